# What a run reads, as an image: on Kubernetes there is no folder to mount. The context is the root of the repository;
# FOLDER holds configuration, model and data, and keeps its path:
#     docker build -f deploy/docker/inputs.Dockerfile -t dvp-rl/inputs --build-arg FOLDER=deploy/demo .
FROM debian:bookworm-slim
ARG FOLDER=deploy/demo
COPY ${FOLDER} /inputs/${FOLDER}
USER 10001:10001
