"""Two tasks of submitit's LocalExecutor train; the same call with ``AutoExecutor`` submits them to Slurm.

python on_submitit.py PLACE OPTIONS    where OPTIONS is the JSON of `program.Options`
"""

import sys

import program
import submitit

if __name__ == "__main__":
    place, options = sys.argv[1:]
    executor = submitit.LocalExecutor(f"{place}/jobs")
    executor.update_parameters(tasks_per_node=2, timeout_min=3)
    executor.submit(program.train, program.from_json(options), place).results()
