# Rendered by `nox -s render` from docker/Dockerfile.template and recipes/: change those.
# cu13.2-torch2.15: the newest of everything, in one environment and without an installed CUDA
#
#   docker build -f docker/cu13.2-torch2.15.Dockerfile -t fusebox:cu13.2-torch2.15 .

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
COPY recipes/lock/cu13.2-torch2.15.*txt recipes/lock/
COPY docker/build-wheel.sh docker/assemble-toolkit.sh docker/
ARG SM=
ARG STANDIN=
ARG ELSEWHERE=
RUN --mount=type=secret,id=ca --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=from=mirror,target=/mirror --mount=from=wheelcache,target=/wheelcache \
    --mount=type=cache,id=fusebox,target=/cache,sharing=locked \
    docker/tool.sh patch cu13.2-torch2.15 --sm "$SM" --standin "$STANDIN" --elsewhere "$ELSEWHERE" \
    --mirror /mirror --wheelcache /wheelcache --into /out

# Compilers, and what the packages are compiled beside: torch and the locked dependencies. Offline from here on.
FROM ubuntu:24.04@sha256:4fbb8e6a8395de5a7550b33509421a2bafbc0aab6c06ba2cef9ebffbc7092d90 AS toolchain
ARG APT=
RUN --mount=type=tmpfs,target=/var/cache --mount=type=tmpfs,target=/var/lib/apt/lists --mount=type=tmpfs,target=/var/log \
    --mount=type=bind,source=docker/apt.sh,target=/apt.sh --mount=type=bind,source=recipes/lock/apt/ubuntu-24.04.txt,target=/ubuntu-24.04.txt \
    apt-get update && /apt.sh /ubuntu-24.04.txt g++ git python3.12-dev
COPY docker/make-environment.sh docker/assemble-toolkit.sh /fusebox/docker/
RUN --network=none --mount=from=sources,source=/out/environment,target=/in \
    --mount=type=bind,from=sources,source=/tool/bin/uv,target=/usr/local/bin/uv \
    /fusebox/docker/make-environment.sh /opt/build /in /in/wheelhouse
COPY docker/build-wheel.sh docker/build-package.sh /fusebox/docker/

FROM toolchain AS wheel-flash-attn
RUN --network=none --mount=from=sources,source=/out/packages/flash-attn,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

FROM toolchain AS wheel-flash-attn-3
RUN --network=none --mount=from=sources,source=/out/packages/flash-attn-3,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

FROM toolchain AS wheel-apex
RUN --network=none --mount=from=sources,source=/out/packages/apex,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

FROM toolchain AS wheel-xformers
RUN --network=none --mount=from=sources,source=/out/packages/xformers,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

FROM toolchain AS wheel-deepspeed
RUN --network=none --mount=from=sources,source=/out/packages/deepspeed,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

FROM toolchain AS wheel-transformer-engine-torch
RUN --network=none --mount=from=sources,source=/out/packages/transformer-engine-torch,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

# Is each wheel what it says, and will it load? Then what the image holds is written down.
FROM sources AS audit
COPY --from=wheel-flash-attn /wheel /wheels/flash-attn
COPY --from=wheel-flash-attn-3 /wheel /wheels/flash-attn-3
COPY --from=wheel-apex /wheel /wheels/apex
COPY --from=wheel-xformers /wheel /wheels/xformers
COPY --from=wheel-deepspeed /wheel /wheels/deepspeed
COPY --from=wheel-transformer-engine-torch /wheel /wheels/transformer-engine-torch
RUN --network=none --mount=from=toolchain,source=/opt/build,target=/opt/build \
    docker/tool.sh audit cu13.2-torch2.15 --sm "$SM" --out /out --wheels /wheels --built-in /opt/build --into /install

FROM ubuntu:24.04@sha256:4fbb8e6a8395de5a7550b33509421a2bafbc0aab6c06ba2cef9ebffbc7092d90 AS base
ARG APT=
RUN --mount=type=tmpfs,target=/var/cache --mount=type=tmpfs,target=/var/lib/apt/lists --mount=type=tmpfs,target=/var/log \
    --mount=type=bind,source=docker/apt.sh,target=/apt.sh --mount=type=bind,source=recipes/lock/apt/ubuntu-24.04.txt,target=/ubuntu-24.04.txt \
    apt-get update && /apt.sh /ubuntu-24.04.txt g++ python3.12-dev

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
ENV NVIDIA_VISIBLE_DEVICES="all"
ENV NVIDIA_DRIVER_CAPABILITIES="compute,utility"
LABEL org.opencontainers.image.title="fusebox cu13.2-torch2.15"
LABEL org.opencontainers.image.description="the newest of everything, in one environment and without an installed CUDA"
LABEL org.opencontainers.image.licenses="Apache-2.0 AND LicenseRef-upstream"
LABEL org.opencontainers.image.base.name="ubuntu:24.04"
LABEL org.opencontainers.image.base.digest="sha256:4fbb8e6a8395de5a7550b33509421a2bafbc0aab6c06ba2cef9ebffbc7092d90"
LABEL fusebox.target="cu13.2-torch2.15"
LABEL fusebox.python="3.12"
LABEL fusebox.cuda="13.2"
LABEL fusebox.driver="580"
LABEL fusebox.supported-until="2029-04"
LABEL fusebox.option.flash-attn-4="forward only on sm 8.0 and 8.9: its backward needs 9.0 or newer"
LABEL fusebox.option.flash-attn-3="for sm 9.0 only; refuses splits, softcap, appended keys, and paged keys that TMA cannot load"
ARG SM=
LABEL fusebox.sm="${SM:-8.0 8.9 9.0 10.0 12.0}"
# Not every package has kernels for every SM, and a label cannot say which has; `nox -s image` knows, and gives its own.
ARG NARROWED="${SM:+those of /opt/fusebox/fusebox/manifest.json}"
LABEL fusebox.packages="${NARROWED:-torch 2.15.0, transformer-engine-cu13 2.20.2, flash-attn-4 4.0.0b36, torchao 0.18.0, torchtitan 0.2.2, liger-kernel 0.8.5, quack-kernels 0.6.5, transformers 5.24.0, accelerate 1.15.0, transformer-engine 2.20.2, flash-attn 2.8.3.post2, flash-attn-3 3.0.0, apex 25.09+52.g6424da3b, xformers 0.0.33.post2, deepspeed 0.19.8, transformer-engine-torch 2.20.2}"
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["dumb-init", "--"]
CMD ["bash"]