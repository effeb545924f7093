"""The report stands alone and says what it could not do."""

import re

import pytest
import torch

from tests.interp.test_extraction import make
from tnlm.interp.views.reporting import report

KINDS = [
    ("bilinear", "bilinear"),
    ("squared", "squared"),
    ("swiglu", "softmax"),
    ("none", "bilinear"),
    ("bilinear", "none"),
]


@pytest.mark.parametrize("mlp, attention", KINDS)
def test_report_is_one_offline_file(mlp, attention, tmp_path):
    tokens = torch.randint(0, 11, (4, 8))
    page = report(make(mlp, attention), tmp_path / "deep" / "report.html", tokens=tokens, progress=False)
    text = page.read_text()
    body = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert text.count("plotly.js v") == 1
    assert not re.search(r"(src|href)=\"(?!data:)", body)
    assert "One prediction explained" in body
    assert ("of the largest logit" in body) == (mlp != "swiglu")
    assert ("has no tensor, so no spectrum" in body) == (mlp in ("swiglu", "none"))


@pytest.mark.user_error
def test_report_wants_rows_with_targets(tmp_path):
    with pytest.raises(ValueError, match="tokens must be"):
        report(make(), tmp_path / "r.html", tokens=torch.zeros(3, dtype=torch.long), progress=False)
    tokens = torch.randint(0, 11, (2, 5))
    with pytest.raises(ValueError, match=r"target must be a token id in \[0, 11\), got 11"):
        report(make(), tmp_path / "r.html", tokens=tokens, target=11, progress=False)
    with pytest.raises(ValueError, match="top must be an integer at least 1, got 0"):
        report(make(), tmp_path / "r.html", tokens=tokens, top=0, progress=False)
    tokens[1, 4] = 12
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 11\), got 12"):
        report(make(), tmp_path / "r.html", tokens=tokens, progress=False)
    assert not list(tmp_path.iterdir())
