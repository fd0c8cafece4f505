from __future__ import annotations

import logging

import pytest
from rllm_renderers.chat_template import ChatTemplateParser
from rllm_renderers.template_check import complaints

CHATML = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


def test_templates_of_the_families_fit_their_models(families, make_family_parser):
    found = {name: list(complaints(make_family_parser(name).template)) for name in families}
    assert {name: one for name, one in found.items() if one} == {}


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (CHATML, None),
        (CHATML.replace("<|im_end|>", ""), "without a stop token of the model (<|im_end|>): '\\n<|im_start|>user"),
        (CHATML.replace("<|im_", "<|turn_"), "of another model: it writes <|turn_start|>, <|turn_end|>"),
        # Its markers are ordinary text, as in some models whose own tokens are not markers either.
        (CHATML.replace("<|im_start|>", "<|role|>"), None),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "without a stop token"),
    ],
)
def test_a_template_that_cannot_fit_is_named(make_parser, template, complaint):
    found = list(complaints(make_parser(template).template))
    assert [complaint in one for one in found] == [True] * (complaint is not None)


def test_the_end_of_an_answer_must_be_a_stop_token(make_parser):
    assert len(list(complaints(make_parser(stops=("<|endoftext|>",)).template))) == 1
    assert list(complaints(make_parser(stops=("<|endoftext|>", "<|im_end|>")).template)) == []


def test_it_is_said_when_a_model_is_loaded(model_folder, caplog):
    caplog.set_level(logging.WARNING)
    ChatTemplateParser.from_model(model_folder)
    assert not caplog.records
    (model_folder / "chat_template.jinja").write_text(CHATML.replace("<|im_end|>", ""))
    ChatTemplateParser.from_model(model_folder)
    [record] = caplog.records
    assert str(model_folder) in record.getMessage()
