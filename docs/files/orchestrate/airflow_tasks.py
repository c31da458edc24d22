"""Airflow: every night, archive what finished a week ago, then report the last day.

Airflow needs no package of the project. Each step is a command of the project, in the project's own environment.
"""

import os
from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

PIPELINE = os.environ.get("TASK_PIPELINE", "/srv/shop/venv/bin/python /srv/shop/manage.py runtaskpipeline")
LAKE = os.environ.get("TASK_LAKE", "/srv/lake")
# A job that was stopped or repeated loses and doubles nothing.
RETRIES = {"retries": 3, "retry_delay": timedelta(minutes=5), "append_env": True}

with DAG("tasks", schedule="0 3 * * *", start_date=datetime(2026, 1, 1), catchup=False, default_args=RETRIES):
    archive = BashOperator(task_id="archive", bash_command=f"{PIPELINE} archive --lake {LAKE} --older-than 7d --quiet")
    report = BashOperator(
        task_id="report", bash_command=f"{PIPELINE} report --lake {LAKE} --since 1d --out {LAKE}-report --quiet"
    )
    archive >> report
