#!/bin/sh
# Exits with 0 once Azure has scheduled an eviction of this Spot VM, or its deletion from its scale set: 30 s ahead or
# more. The events of the other VMs of a scale set are listed, too.
set -eu
url=${METADATA_URL:-http://169.254.169.254}/metadata
ask() { curl --silent --show-error --fail --max-time 5 --header 'Metadata: true' "$url/$1"; }
name=$(ask 'instance/compute/name?api-version=2021-02-01&format=text')
events=$(ask 'scheduledevents?api-version=2020-07-01' | tr -d '\n')
echo "$events" | grep -o '{[^{}]*}' | grep -E '"EventType": *"(Preempt|Terminate)"' | grep -F "\"$name\""
