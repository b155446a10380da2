# A server of coattn. For NVIDIA GPUs:
#   docker build -t coattn .
#   docker run --gpus all --ipc host --ulimit memlock=-1 -p 8000:8000 -e COATTN_API_KEY coattn serve --model MODEL --host 0.0.0.0
# For the CPU alone, which is far smaller:
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu -t coattn:cpu .
# PyTorch's wheels bring the CUDA libraries; the machine needs the driver and NVIDIA's container toolkit, nothing else.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ cmake ninja-build && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml CMakeLists.txt LICENSE README.md ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.12-slim
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://pypi.org/simple
# Triton compiles the launchers of its kernels with a C compiler when they are first needed
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$TORCH"
COPY --from=build /wheel /wheel
RUN pip install --no-cache-dir "$(echo /wheel/coattn-*.whl)[serve]" && rm -r /wheel
RUN useradd --create-home coattn
USER coattn
WORKDIR /home/coattn
# models, compiled kernels and sessions: keep them with -v coattn:/home/coattn/.cache
VOLUME /home/coattn/.cache
EXPOSE 8000
ENTRYPOINT ["coattn"]
CMD ["doctor"]
