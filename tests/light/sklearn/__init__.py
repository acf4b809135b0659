"""In place of scikit-learn where the examples need its digits alone: the import of the whole takes as long as torch's.

Every rank of every restart in these tests would pay for it. A test that is about imports does without this directory.
"""
