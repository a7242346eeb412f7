"""What the draft worker and the target worker share: start-up, the receive loop, the table of open requests.

Imports protocol and execution; never draft_worker, target_worker or orchestrator.
"""
