#!/bin/sh
# Exits with 0 once EC2 has announced that it will stop, terminate or hibernate this spot instance: two minutes ahead.
set -eu
url=${METADATA_URL:-http://169.254.169.254}/latest
ask() { curl --silent --show-error --fail --max-time 5 "$@"; }
token=$(ask --request PUT --header 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$url/api/token")
ask --header "X-aws-ec2-metadata-token: $token" "$url/meta-data/spot/instance-action" # 404 until then
