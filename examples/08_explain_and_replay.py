"""Record a run, ask why a request waited, repeat the whole schedule, and check the decision log for changes.

python examples/08_explain_and_replay.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.audit.trail import verify
from paceline.simulation import explain_from_log, read_run_log, replay

folder = Path(tempfile.mkdtemp(prefix="paceline-"))
log, decisions = folder / "run.jsonl.gz", folder / "decisions"

# Two rows for six prompts: four of them have to wait.
model = sys.argv[1] if len(sys.argv) > 1 else None
llm = LLM(model, max_num_seqs=2, run_log=str(log), decision_log=str(decisions))
llm.generate([f"Story number {n}:" for n in range(6)], SamplingParams(max_tokens=12), use_tqdm=False)
llm.loaded.engine.close()

for sentence in explain_from_log(read_run_log(log), 6).sentences():
    print(sentence)

report = replay(read_run_log(log))
print(f"replay: {'identical' if report.is_equal else report.difference}, {report.num_steps} steps")

verdict = verify(decisions)
print(f"decision log: {verdict.problem or 'whole'}, {verdict.num_entries:,} decisions")
