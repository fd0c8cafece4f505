#!/bin/bash
# Trains a run file on the machines of a SLURM job, on a Ray cluster that lives as long as the job:
#
#     sbatch --nodes 4 slurm.sh run.toml SHARED/runs/first
#
# Change the lines below for your cluster, and set ray_address = "auto" in the run file. When the job's time is nearly
# up, the run saves a checkpoint, and the job queues itself again and resumes.

#SBATCH --job-name=rllm
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
run_file=$1
run_dir=$2
# Ray only counts CPUs; backend verl needs 3 for each training device, 2 for each device of servers, and one more.
cpus=${SLURM_CPUS_PER_TASK:-64}

export SRUN_CPUS_PER_TASK=$cpus
export RAY_TMPDIR=/tmp/ray-$SLURM_JOB_ID
# Without a token, everybody who can connect to the machines could run code there.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN

# The batch script runs on the first machine of the job, which becomes the head.
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${machines[0]}
port=$((20000 + SLURM_JOB_ID % 10000))
ray start --head --node-ip-address "$head" --port "$port" --num-cpus "$cpus" --block --include-dashboard false &
started=($!)
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  others=$((SLURM_JOB_NUM_NODES - 1))
  srun --nodes "$others" --ntasks "$others" --relative 1 \
    ray start --address "$head:$port" --num-cpus "$cpus" --block &
  started+=($!)
fi
trap 'kill "${started[@]}"' EXIT

export RAY_ADDRESS=$head:$port
nodes='import ray; ray.init(log_to_driver=False, logging_level="ERROR"); print(sum(node["Alive"] for node in ray.nodes()))'
until [ "$(python -c "$nodes" 2>/dev/null)" = "$SLURM_JOB_NUM_NODES" ]; do
  for process in "${started[@]}"; do
    kill -0 "$process" || { echo "Ray has ended: its messages are above" >&2; exit 1; }
  done
  sleep 1
done

if [ -e "$run_dir/run.toml" ]; then
  rllm-core train --resume --run-dir "$run_dir" &
else
  rllm-core train "$run_file" --run-dir "$run_dir" &
fi
run=$!
is_stopping=
trap 'is_stopping=yes; kill -TERM "$run"' TERM
status=0
wait "$run" || status=$?
if [ -n "$is_stopping" ]; then
  status=0
  wait "$run" || status=$?
fi
if [ "$status" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
