# A replica with SGLang or vLLM on GPUs. The build context is the repository root:
#     docker build -f deploy/docker/server.Dockerfile --build-arg SERVER=vllm -t dvp-rl/rollout-vllm .
#     docker run --gpus all --shm-size 32g -e DVP_ROLLOUT__TOKEN -v ./models:/models:ro -p 127.0.0.1:8000:8000 \
#       dvp-rl/rollout-vllm --model /models/Qwen3-0.6B
#
# The server's own image brings CUDA and every version that it pins, torch among them. None of them is changed: the
# plugin is installed without dependencies, and the rollout service, which needs no torch for these engines, has its own
# environment. The two communicate over loopback.
ARG SERVER=sglang

FROM python:3.11-slim AS wanted
WORKDIR /wanted
COPY pyproject.toml deploy/docker/wanted.py ./
RUN python wanted.py pyproject.toml rollout otel > rollout.txt

FROM python:3.11-slim AS plugin
ARG SERVER
WORKDIR /build
COPY deploy/dvp-${SERVER} deploy/dvp-${SERVER}
COPY services/dvp_rl/__init__.py services/dvp_rl/__init__.py
COPY services/dvp_rl/dvp services/dvp_rl/dvp
COPY services/dvp_rl/${SERVER}_plugin services/dvp_rl/${SERVER}_plugin
RUN pip wheel --no-cache-dir --no-deps -w /wheels ./deploy/dvp-${SERVER}

FROM lmsysorg/sglang:v0.5.23 AS sglang
FROM vllm/vllm-openai:v0.32.0 AS vllm

FROM ${SERVER}
ARG SERVER
ENV PYTHONUNBUFFERED=1 HOME=/tmp
COPY --from=plugin /wheels /tmp/wheels
# Also a check: the plugin refuses a version of the server that it was not tested with.
RUN python3 -m pip install --no-cache-dir --no-deps /tmp/wheels/*.whl \
  && python3 -c "from dvp_${SERVER}.${SERVER}_plugin.plugin import register; register()"
# A fixed name for the interpreter that the image calls python3.
RUN printf '#!/bin/sh\nexec "%s" "$@"\n' "$(command -v python3)" > /usr/local/bin/server-python \
  && chmod 755 /usr/local/bin/server-python

COPY requirements.lock /tmp/
COPY --from=wanted /wanted/rollout.txt /tmp/
RUN python3 -m venv --without-pip /opt/dvp \
  && python3 -m pip --python /opt/dvp/bin/python install --no-cache-dir --only-binary :all: \
    -c /tmp/requirements.lock -r /tmp/rollout.txt
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin dvp && install -d -o dvp -g dvp /weights /runs
WORKDIR /app
COPY services/dvp_rl dvp_rl
USER dvp
# Unlike the server's port, which stays on loopback, this one is published and requires DVP_ROLLOUT__TOKEN.
ENV DVP_ROLLOUT__ENGINE=${SERVER} DVP_ROLLOUT__SGLANG__PYTHON=/usr/local/bin/server-python \
  DVP_ROLLOUT__VLLM__PYTHON=/usr/local/bin/server-python DVP_ROLLOUT__DEVICE=cuda DVP_ROLLOUT__DTYPE=bfloat16 \
  DVP_ROLLOUT__HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=5s --start-period=600s --retries=3 \
  CMD ["/opt/dvp/bin/python", "-S", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:8000/readyz', timeout=4)"]
ENTRYPOINT ["/opt/dvp/bin/python", "-m", "dvp_rl.rollout"]
