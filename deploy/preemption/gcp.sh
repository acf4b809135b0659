#!/bin/sh
# Exits with 0 once Compute Engine preempts this Spot VM: 30 s ahead.
set -eu
url=${METADATA_URL:-http://metadata.google.internal}/computeMetadata/v1/instance/preempted
is_preempted=$(curl --silent --show-error --fail --max-time 5 --header 'Metadata-Flavor: Google' "$url")
echo "preempted: $is_preempted"
test "$is_preempted" = TRUE
