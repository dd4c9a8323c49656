"""locust: five users for ten seconds."""

import tempfile
from pathlib import Path

from cases import BASE_URL, KEY, MODEL, beside_this_python, case, expect, main, run

LOCUSTFILE = f"""
from locust import HttpUser, task

class User(HttpUser):
    @task
    def ask(self):
        self.client.post(
            "/chat/completions",
            json={{"model": {MODEL!r}, "max_tokens": 8, "messages": [{{"role": "user", "content": "hi"}}]}},
            headers={{"Authorization": "Bearer {KEY}"}},
        )
"""


@case("load")
def load() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "locustfile.py").write_text(LOCUSTFILE)
        said = run(
            *(beside_this_python("locust"), "-f", f"{folder}/locustfile.py", "--headless", "--only-summary"),
            *("-u", "5", "-r", "5", "-t", "10s", "--host", BASE_URL),
        )
    expect("0(0.00%)" in said and "/chat/completions" in said, said[-400:])


main()
