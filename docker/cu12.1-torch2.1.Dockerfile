# Rendered by `nox -s render` from docker/Dockerfile.template and recipes/: change those.
# cu12.1-torch2.1: the 2024 articles' versions on a public base
#
#   docker build -f docker/cu12.1-torch2.1.Dockerfile -t fusebox:cu12.1-torch2.1 .

# Both are empty here: --build-context mirror=DIR (or wheelcache=DIR) puts a folder in their place.
FROM scratch AS mirror
FROM scratch AS wheelcache

# All that comes from the network, fetched, verified and patched by the tool on a Python of its own.
FROM python:3.12-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254 AS sources
ARG APT=
RUN --mount=type=tmpfs,target=/var/cache --mount=type=tmpfs,target=/var/lib/apt/lists --mount=type=tmpfs,target=/var/log \
    --mount=type=bind,source=docker/apt.sh,target=/apt.sh --mount=type=bind,source=recipes/lock/apt/python-3.12-slim-bookworm.txt,target=/python-3.12-slim-bookworm.txt \
    apt-get update && /apt.sh /python-3.12-slim-bookworm.txt git
WORKDIR /fusebox
COPY docker/tool.sh docker/
COPY recipes/lock/tool.txt recipes/lock/
RUN --mount=type=secret,id=ca --mount=type=secret,id=pip,target=/etc/pip.conf docker/tool.sh install
COPY pyproject.toml ./
COPY patches patches
COPY recipes/packages recipes/packages
COPY recipes/catalogue recipes/catalogue
COPY recipes/make recipes/make
COPY recipes/ship recipes/ship
COPY recipes/verbs recipes/verbs
COPY recipes/*.py recipes/*.toml recipes/
COPY recipes/lock/cu12.1-torch2.1.*txt recipes/lock/
COPY docker/build-wheel.sh docker/assemble-toolkit.sh docker/
ARG SM=
ARG STANDIN=
ARG ELSEWHERE=
RUN --mount=type=secret,id=ca --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=from=mirror,target=/mirror --mount=from=wheelcache,target=/wheelcache \
    --mount=type=cache,id=fusebox,target=/cache,sharing=locked \
    docker/tool.sh patch cu12.1-torch2.1 --sm "$SM" --standin "$STANDIN" --elsewhere "$ELSEWHERE" \
    --mirror /mirror --wheelcache /wheelcache --into /out

# Compilers, and what the packages are compiled beside: torch and the locked dependencies. Offline from here on.
FROM nvidia/cuda:12.1.1-cudnn8-devel-ubuntu22.04@sha256:21196d81f56b48dbee70494d5f10322e1a77cc47ffe202a3bf68eab81533c20f AS toolchain
ARG APT=
RUN --mount=type=tmpfs,target=/var/cache --mount=type=tmpfs,target=/var/lib/apt/lists --mount=type=tmpfs,target=/var/log \
    --mount=type=bind,source=docker/apt.sh,target=/apt.sh --mount=type=bind,source=recipes/lock/apt/nvidia-cuda-12.1.1-cudnn8-devel-ubuntu22.04.txt,target=/nvidia-cuda-12.1.1-cudnn8-devel-ubuntu22.04.txt \
    apt-get update && /apt.sh /nvidia-cuda-12.1.1-cudnn8-devel-ubuntu22.04.txt git python3.10-dev
COPY docker/make-environment.sh docker/assemble-toolkit.sh /fusebox/docker/
RUN --network=none --mount=from=sources,source=/out/environment,target=/in \
    --mount=type=bind,from=sources,source=/tool/bin/uv,target=/usr/local/bin/uv \
    /fusebox/docker/make-environment.sh /opt/build /in /in/wheelhouse
COPY docker/build-wheel.sh docker/build-package.sh /fusebox/docker/

FROM toolchain AS wheel-transformers
RUN --network=none --mount=from=sources,source=/out/packages/transformers,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

FROM toolchain AS wheel-transformer-engine
RUN --network=none --mount=from=sources,source=/out/packages/transformer-engine,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

FROM toolchain AS wheel-flash-attn
RUN --network=none --mount=from=sources,source=/out/packages/flash-attn,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

FROM toolchain AS wheel-rotary-emb
RUN --network=none --mount=from=sources,source=/out/packages/rotary-emb,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

FROM toolchain AS wheel-xentropy-cuda-lib
RUN --network=none --mount=from=sources,source=/out/packages/xentropy-cuda-lib,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

FROM toolchain AS wheel-dropout-layer-norm
RUN --network=none --mount=from=sources,source=/out/packages/dropout-layer-norm,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

FROM toolchain AS wheel-apex
RUN --network=none --mount=from=sources,source=/out/packages/apex,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

FROM toolchain AS wheel-deepspeed
RUN --network=none --mount=from=sources,source=/out/packages/deepspeed,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

# Is each wheel what it says, and will it load? Then what the image holds is written down.
FROM sources AS audit
COPY --from=wheel-transformers /wheel /wheels/transformers
COPY --from=wheel-transformer-engine /wheel /wheels/transformer-engine
COPY --from=wheel-flash-attn /wheel /wheels/flash-attn
COPY --from=wheel-rotary-emb /wheel /wheels/rotary-emb
COPY --from=wheel-xentropy-cuda-lib /wheel /wheels/xentropy-cuda-lib
COPY --from=wheel-dropout-layer-norm /wheel /wheels/dropout-layer-norm
COPY --from=wheel-apex /wheel /wheels/apex
COPY --from=wheel-deepspeed /wheel /wheels/deepspeed
RUN --network=none --mount=from=toolchain,source=/opt/build,target=/opt/build \
    docker/tool.sh audit cu12.1-torch2.1 --sm "$SM" --out /out --wheels /wheels --built-in /opt/build --into /install

FROM ubuntu:22.04@sha256:0eb0f877e1c869a300c442c41120e778db7161419244ee5cbc6fa5f134e74736 AS base
ARG APT=
RUN --mount=type=tmpfs,target=/var/cache --mount=type=tmpfs,target=/var/lib/apt/lists --mount=type=tmpfs,target=/var/log \
    --mount=type=bind,source=docker/apt.sh,target=/apt.sh --mount=type=bind,source=recipes/lock/apt/ubuntu-22.04.txt,target=/ubuntu-22.04.txt \
    apt-get update && /apt.sh /ubuntu-22.04.txt g++ python3.10-dev

FROM base AS installed
RUN --network=none --mount=from=sources,source=/out/environment/wheelhouse,target=/wheelhouse \
    --mount=type=bind,from=sources,source=/tool/bin/uv,target=/usr/local/bin/uv \
    --mount=from=audit,source=/install,target=/in \
    --mount=type=bind,source=docker/make-environment.sh,target=/make-environment.sh \
    --mount=type=bind,source=docker/split-layers.sh,target=/split-layers.sh \
    /make-environment.sh /opt/fusebox /in /in/wheelhouse /wheelhouse && /split-layers.sh /opt/fusebox /layers

# What seldom changes comes first: a change of a layer changes only those after it.
FROM base AS runtime
COPY --from=installed /layers/cuda /
COPY --from=installed /layers/torch /
COPY --from=installed /layers/dependencies /
COPY --from=installed /layers/packages /
# The first process: it hands signals on, so that a container stops at once, and reaps what is orphaned.
COPY --from=sources /tool/bin/dumb-init /usr/local/bin/dumb-init
RUN --network=none \
    echo "fusebox:x:10001:" >> /etc/group && echo "fusebox:x:10001:10001::/tmp:/bin/bash" >> /etc/passwd && \
    # for whoever runs the image, also after root installed something on top of it
    mkdir --mode=1777 /tmp/cache && \
    # a login shell, as enroot starts one, makes a PATH of its own
    echo "PATH=/opt/fusebox/bin:\$PATH" > /etc/profile.d/fusebox.sh
# COPY would keep the modes of the checkout, which the umask of whoever cloned it made.
RUN --network=none --mount=type=bind,source=docker/smoke.sh,target=/smoke.sh \
    --mount=from=audit,source=/install/fusebox,target=/fusebox \
    --mount=type=bind,source=smoke_tests,target=/smoke_tests \
    install -D --mode=644 /fusebox/constraints.txt /opt/fusebox/constraints.txt && \
    install /smoke.sh /usr/local/bin/smoke && cp -R /smoke_tests /opt/fusebox/ && \
    chmod -R u=rwX,go=rX /opt/fusebox/smoke_tests
# pip and uv change nothing that is installed here, whatever is added on top.
ENV PIP_CONSTRAINT=/opt/fusebox/constraints.txt UV_CONSTRAINT=/opt/fusebox/constraints.txt
ENV PATH=/opt/fusebox/bin:$PATH VIRTUAL_ENV=/opt/fusebox \
    HOME=/tmp USER=fusebox XDG_CACHE_HOME=/tmp/cache PYTHONPYCACHEPREFIX=/tmp/cache/python \
    TRITON_CACHE_DIR=/tmp/cache/triton TORCHINDUCTOR_CACHE_DIR=/tmp/cache/inductor
ENV NVTE_FUSED_ATTN="0"
ENV NVTE_CUDA_INCLUDE_DIR="/opt/fusebox/lib/python3.10/site-packages/nvidia/cuda_runtime/include"
ENV NVIDIA_VISIBLE_DEVICES="all"
ENV NVIDIA_DRIVER_CAPABILITIES="compute,utility"
LABEL org.opencontainers.image.title="fusebox cu12.1-torch2.1"
LABEL org.opencontainers.image.description="the 2024 articles' versions on a public base"
LABEL org.opencontainers.image.licenses="Apache-2.0 AND LicenseRef-upstream"
LABEL org.opencontainers.image.base.name="ubuntu:22.04"
LABEL org.opencontainers.image.base.digest="sha256:0eb0f877e1c869a300c442c41120e778db7161419244ee5cbc6fa5f134e74736"
LABEL fusebox.target="cu12.1-torch2.1"
LABEL fusebox.python="3.10"
LABEL fusebox.cuda="12.1"
LABEL fusebox.driver="525"
LABEL fusebox.supported-until="2027-04"
LABEL fusebox.packages="torch 2.1.2, transformers 4.40.2, accelerate 1.10.1, transformer-engine 1.7, flash-attn 2.5.8, rotary-emb 2.5.8, xentropy-cuda-lib 2.5.8, dropout-layer-norm 2.5.8, apex 23.05, xformers 0.0.23.post1, deepspeed 0.13.1"
LABEL fusebox.option.flash-attn="head sizes 64 and 128 only (they serve 33 to 64 and 97 to 128); another is refused"
LABEL fusebox.option.dropout-layer-norm="hidden sizes 769 to 1024, 1537 to 2048, 3073 to 4096 and 7169 to 8192 only, without parallel residuals; another is refused"
LABEL fusebox.option.transformer-engine="fused attention off (NVTE_FUSED_ATTN=0): it finds no execution plan with torch's cuDNN 8.9.2.26"
ARG SM=
LABEL fusebox.sm="${SM:-8.0 9.0}"
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["dumb-init", "--"]
CMD ["bash"]