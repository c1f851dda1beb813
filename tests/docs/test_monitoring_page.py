"""What docs/monitoring.md and "Make certificates" of docs/tls.md show is what happens."""

import re
import ssl
import subprocess
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import pytest
import yaml

from export import export_model
from serving.client import LookupClient, Tls
from tests.support.models import SUM, collection
from tests.support.servers import running

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
PROMETHEUS = ROOT / "deploy" / "prometheus"


def block(page: str, start: str) -> str:
    """The code block that starts with `start`."""
    (text,) = re.findall(rf"^```\w*\n({re.escape(start)}.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return str(text)


def test_the_page_shows_the_scrape_configuration_of_deploy() -> None:
    assert block(PAGE, "rule_files") == (PROMETHEUS / "prometheus.yml").read_text()
    assert (PROMETHEUS / "alerts.yaml").read_bytes() == (ROOT / "export/kubernetes/alerts.yaml").read_bytes()


def test_metrics_are_scraped_with_tls_and_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    certificates = block((ROOT / "docs" / "tls.md").read_text(), "openssl req")
    token, run_server = block(PAGE, "openssl rand").splitlines()
    subprocess.run(["bash", "-e", "-c", f"{certificates}\n{token}"], check=True, capture_output=True)
    for name in ("prometheus.yml", "alerts.yaml"):
        Path(name).write_bytes((PROMETHEUS / name).read_bytes())
    subprocess.run(block(PAGE, "promtool").splitlines()[0].split(), check=True, capture_output=True)

    export_model(collection(SUM), Path("repository"), "movies")
    options = run_server.removeprefix("tbe-serve run repository ").replace("0.0.0.0", "127.0.0.1").split()
    (scrape,) = yaml.safe_load(Path("prometheus.yml").read_text())["scrape_configs"]
    context = ssl.create_default_context(cafile=scrape["tls_config"]["ca_file"])
    with running(Path("repository"), *options) as server:
        metrics = f"{server.operations}/metrics".replace("127.0.0.1", "localhost")
        with pytest.raises(HTTPError, match="401"):
            urllib.request.urlopen(metrics, timeout=30, context=context)
        bearer = Path(scrape["authorization"]["credentials_file"]).read_text().strip()
        request = urllib.request.Request(metrics, headers={"Authorization": f"Bearer {bearer}"})
        with urllib.request.urlopen(request, timeout=30, context=context) as response:
            assert b"tbe_ready 1" in response.read()
        with LookupClient(server.grpc, "movies", 30, tls=Tls(root_certificates=Path("ca.crt"))) as client:
            assert client.info().dims
