"""What a delegation costs beside a plain Celery task, both measured in one run: `python -m benchmarks`.

Speed is shown as ratios, with the targets beside them; no test asserts a time. Run it on a quiet machine.
"""
