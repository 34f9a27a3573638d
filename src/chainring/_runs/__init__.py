"""Reading a run that has ended, was killed, or continues: where it is (`locate`), and what it has left (`FinishedRun`).

Nothing here trains, changes a file of a run, or trusts what stands in one.
"""
