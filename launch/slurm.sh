#!/usr/bin/env bash
# A trainer and samplers, each a step of one Slurm allocation:
#   sbatch --nodes=3 [--gpus-per-node=8 ...] launch/slurm.sh CONFIG [KEY=VALUE]... --run-dir RUN [--trainer-nodes 1]
# The trainer has the first nodes, every other node is a sampler. RUN is on a file system that all nodes share.
# Three minutes before the time is up the trainer is asked to stop and save; the same command goes on from there.
#SBATCH --job-name=jaxrl
#SBATCH --signal=B:TERM@180
#SBATCH --open-mode=append
set -euo pipefail
# Slurm runs a copy of this file; the launcher lies where sbatch was called, or in JAXRL_LAUNCH.
exec "${JAXRL_PYTHON:-python3}" "${JAXRL_LAUNCH:-$SLURM_SUBMIT_DIR/launch}/slurm.py" "$@"
