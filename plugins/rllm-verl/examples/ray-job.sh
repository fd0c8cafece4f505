#!/bin/bash
# Sends a run file to a Ray cluster as a job, and returns while it runs there:
#
#     bash ray-job.sh HEAD run.toml SHARED/runs/first
#
# HEAD is the first machine of the cluster. The run file and the run folder are paths on its machines, and the run file
# has ray_address = "auto". A run folder that exists is resumed.

set -euo pipefail
head=$1
run_file=$2
run_dir=$3
run=$(basename "$run_dir")

# Ray names jobs once, so a resumed run needs a new name.
job=$run-$(date +%Y%m%d-%H%M%S)
# shellcheck disable=SC2016  # bash on the head expands it
train='if [ -e "$1/run.toml" ]; then exec rllm-core train --resume --run-dir "$1"; fi; exec rllm-core train "$0" --run-dir "$1"'
ray job submit --address "http://$head:8265" --no-wait --submission-id "$job" -- bash -c "$train" "$run_file" "$run_dir"
echo "follow: ray job logs --address http://$head:8265 --follow $job"
echo "stop:   ray job stop --address http://$head:8265 $job"
