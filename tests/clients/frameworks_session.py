"""A scripted session: libraries and programs that speak the OpenAI API, unmodified, against a running server.

    frameworks_session.py URL --node-modules FOLDER

URL is a server's address without a path; it serves the model that is built in. FOLDER has the package openai of npm, if
Node.js is there. Prints one line per check: "ok NAME", "FAILED NAME: why" or "skipped NAME: why". For each client that
passed, a line "client NAME VERSION: what was tried" follows, of which docs/clients.md is made.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from runner import run

# A client that asks other hosts, for prices or telemetry, would make the test depend on them.
os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_TELEMETRY="False", DO_NOT_TRACK="1", LANGCHAIN_TRACING_V2="false"
)
warnings.filterwarnings("ignore")

PROMPT = "Once upon a time"
TRIED = {}


def client(name, package, tried):
    """Marks a check as that of a client, whose version is that of a package."""

    def mark(check):
        TRIED[check] = (name, package, tried)
        return check

    return mark


@client("LangChain", "langchain-openai", "invoke, stream, batch, structured output by JSON Schema, completions")
def langchain(options):
    from langchain_openai import ChatOpenAI, OpenAI
    from pydantic import BaseModel, ConfigDict, Field

    chat = ChatOpenAI(model=options.model, base_url=options.base, api_key="none", temperature=0, max_tokens=16)
    whole = chat.invoke(PROMPT)
    assert whole.content and whole.usage_metadata["output_tokens"] <= 16, whole
    parts = [part.content for part in chat.stream(PROMPT)]
    assert "".join(parts) == whole.content and len(parts) > 2, parts
    assert [answer.content for answer in chat.batch([PROMPT, PROMPT])] == [whole.content] * 2

    class Cat(BaseModel):
        model_config = ConfigDict(extra="forbid")
        name: str = Field(max_length=8)
        age: int = Field(ge=0, le=20)

    longer = ChatOpenAI(model=options.model, base_url=options.base, api_key="none", temperature=0, max_tokens=200)
    cat = longer.with_structured_output(Cat, method="json_schema").invoke("Describe a cat.")
    assert isinstance(cat, Cat) and cat.age <= 20, cat
    text = OpenAI(model=options.model, base_url=options.base, api_key="none", temperature=0, max_tokens=8)
    assert text.invoke(PROMPT)


@client("LlamaIndex", "llama-index-llms-openai-like", "complete, chat, stream_chat, async chat")
def llama_index(options):
    import asyncio

    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=options.model, api_base=options.base, api_key="none", is_chat_model=True, temperature=0, max_tokens=16
    )
    messages = [ChatMessage(role="user", content=PROMPT)]
    whole = llm.chat(messages).message.content
    assert whole
    assert [part for part in llm.stream_chat(messages)][-1].message.content == whole
    assert asyncio.run(llm.achat(messages)).message.content == whole
    plain = OpenAILike(model=options.model, api_base=options.base, api_key="none", temperature=0, max_tokens=8)
    assert plain.complete(PROMPT).text


@client("LiteLLM", "litellm", "completion, streaming, text_completion, errors mapped to its classes")
def lite_llm(options):
    import litellm

    call = {"model": f"openai/{options.model}", "api_base": options.base, "api_key": "none", "max_tokens": 16}
    messages = [{"role": "user", "content": PROMPT}]
    whole = litellm.completion(messages=messages, temperature=0, **call)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens <= 16, whole
    parts = litellm.completion(messages=messages, temperature=0, stream=True, **call)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    call["model"] = f"text-completion-openai/{options.model}"
    assert litellm.text_completion(prompt=PROMPT, **call).choices[0].text
    try:
        litellm.completion(messages=messages, **{**call, "model": "openai/other"})
    except litellm.NotFoundError as error:
        assert options.model in str(error), error
    else:
        raise AssertionError("another model's name is an error")


@client("Instructor", "instructor", "structured output in the modes JSON_SCHEMA and TOOLS")
def instructor_modes(options):
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel, ConfigDict, Field

    class City(BaseModel):
        model_config = ConfigDict(extra="forbid")
        name: str = Field(max_length=8)
        rainy: bool

    for mode in [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS]:
        patched = instructor.from_openai(OpenAI(base_url=options.base, api_key="none"), mode=mode)
        messages = [{"role": "user", "content": "Describe a city."}]
        city = patched.chat.completions.create(
            model=options.model, messages=messages, response_model=City, max_tokens=200, max_retries=0, temperature=0
        )
        assert isinstance(city, City), (mode, city)


@client("llm (command line)", "llm", "a prompt, streamed and whole, with a model of extra-openai-models.yaml")
def llm_program(options):
    with tempfile.TemporaryDirectory() as folder:
        model = {"model_id": "mainstem", "model_name": options.model, "api_base": options.base, "api_key_name": "none"}
        # JSON is YAML.
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([model]))
        environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        answers = []
        for flags in [[], ["--no-stream"]]:
            command = [sys.executable, "-m", "llm", "-m", "mainstem", "-o", "temperature", "0", "-o", "max_tokens", "16"]
            done = subprocess.run(
                [*command, "--key", "none", *flags, PROMPT], env=environment, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0 and done.stdout.strip(), done.stderr[-400:]
            answers.append(done.stdout)
        assert answers[0] == answers[1], answers


NODE_SCRIPT = """
import OpenAI from 'openai';
const [base, model, prompt] = process.argv.slice(-3);
const client = new OpenAI({ baseURL: base, apiKey: 'none' });
const messages = [{ role: 'user', content: prompt }];
const call = { model, messages, temperature: 0, max_tokens: 16 };
const whole = (await client.chat.completions.create(call)).choices[0].message.content;
let text = '';
for await (const part of await client.chat.completions.create({ ...call, stream: true }))
  text += part.choices[0]?.delta?.content ?? '';
if (!whole || whole !== text) throw new Error(JSON.stringify([whole, text]));
const models = (await client.models.list()).data.map((it) => it.id);
if (!models.includes(model)) throw new Error(JSON.stringify(models));
const completion = await client.completions.create({ model, prompt, max_tokens: 4 });
if (completion.usage.completion_tokens > 4) throw new Error(JSON.stringify(completion));
try {
  await client.chat.completions.create({ ...call, model: 'other' });
  throw new Error('another model is an error');
} catch (error) {
  if (!(error instanceof OpenAI.NotFoundError)) throw error;
}
"""


@client("openai (Node.js)", None, "chat, streaming, completions, models, errors as its classes")
def openai_node(options):
    script = Path(options.node_modules, "session.mjs")
    script.write_text(NODE_SCRIPT)
    command = ["node", script.name, options.base, options.model, PROMPT]
    done = subprocess.run(command, cwd=options.node_modules, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-600:]


def version(package, options):
    if package:
        return importlib.metadata.version(package)
    manifest = Path(options.node_modules, "node_modules/openai/package.json")
    return json.loads(manifest.read_text())["version"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--node-modules")
    options = parser.parse_args()
    import openai

    options.base = options.url.rstrip("/") + "/v1"
    options.model = openai.OpenAI(base_url=options.base, api_key="none").models.list().data[0].id
    passed = True
    for check, (name, package, tried) in TRIED.items():
        title = f"the client {name}"
        if check is openai_node and not (options.node_modules and shutil.which("node")):
            print(f"skipped {title}: there is no node with the package openai", flush=True)
            continue
        if run(title, check, options):
            print(f"client {name} {version(package, options)}: {tried}", flush=True)
        else:
            passed = False
    sys.exit(not passed)


if __name__ == "__main__":
    main()
