# The inputs of a run as an image, because Kubernetes has no folder to mount. The build context is the repository root;
# FOLDER holds configuration, model and data, and keeps its path:
#     docker build -f deploy/docker/inputs.Dockerfile -t dvp-rl/inputs --build-arg FOLDER=deploy/demo .
FROM debian:bookworm-slim
ARG FOLDER=deploy/demo
# Readable for everybody, unlike weights as Transformers writes them.
COPY --chmod=755 ${FOLDER} /inputs/${FOLDER}
USER 10001:10001
