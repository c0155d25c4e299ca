# Rendered by `nox -s render` from docker/Dockerfile.template and recipes/: change those.
# cpu: any x86-64 machine: the default, and the proof that the toolchain works
#
#   docker build -f docker/cpu.Dockerfile -t fusebox:cpu .

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
COPY recipes/lock/cpu.*txt recipes/lock/
COPY docker/build-wheel.sh docker/assemble-toolkit.sh docker/
ARG SM=
ARG STANDIN=
ARG ELSEWHERE=
RUN --mount=type=secret,id=ca --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=from=mirror,target=/mirror --mount=from=wheelcache,target=/wheelcache \
    --mount=type=cache,id=fusebox,target=/cache,sharing=locked \
    docker/tool.sh patch cpu --sm "$SM" --standin "$STANDIN" --elsewhere "$ELSEWHERE" \
    --mirror /mirror --wheelcache /wheelcache --into /out

# Compilers, and what the packages are compiled beside: torch and the locked dependencies. Offline from here on.
FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS toolchain
ARG APT=
RUN --mount=type=tmpfs,target=/var/cache --mount=type=tmpfs,target=/var/lib/apt/lists --mount=type=tmpfs,target=/var/log \
    --mount=type=bind,source=docker/apt.sh,target=/apt.sh --mount=type=bind,source=recipes/lock/apt/python-3.11-slim-bookworm.txt,target=/python-3.11-slim-bookworm.txt \
    apt-get update && /apt.sh /python-3.11-slim-bookworm.txt g++ python3-dev
COPY docker/make-environment.sh docker/assemble-toolkit.sh /fusebox/docker/
RUN --network=none --mount=from=sources,source=/out/environment,target=/in \
    --mount=type=bind,from=sources,source=/tool/bin/uv,target=/usr/local/bin/uv \
    /fusebox/docker/make-environment.sh /opt/build /in /in/wheelhouse
COPY docker/build-wheel.sh docker/build-package.sh /fusebox/docker/

FROM toolchain AS wheel-transformers
RUN --network=none --mount=from=sources,source=/out/packages/transformers,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

FROM toolchain AS wheel-deepspeed
RUN --network=none --mount=from=sources,source=/out/packages/deepspeed,target=/in \
    --mount=type=cache,id=fusebox-one-at-a-time,target=/one-at-a-time,sharing=locked \
    /fusebox/docker/build-package.sh /in /wheel

# Is each wheel what it says, and will it load? Then what the image holds is written down.
FROM sources AS audit
COPY --from=wheel-transformers /wheel /wheels/transformers
COPY --from=wheel-deepspeed /wheel /wheels/deepspeed
RUN --network=none --mount=from=toolchain,source=/opt/build,target=/opt/build \
    docker/tool.sh audit cpu --sm "$SM" --out /out --wheels /wheels --built-in /opt/build --into /install

FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS base

FROM base AS installed
RUN --network=none --mount=from=sources,source=/out/environment/wheelhouse,target=/wheelhouse \
    --mount=type=bind,from=sources,source=/tool/bin/uv,target=/usr/local/bin/uv \
    --mount=from=audit,source=/install,target=/in \
    --mount=type=bind,source=docker/make-environment.sh,target=/make-environment.sh \
    --mount=type=bind,source=docker/split-layers.sh,target=/split-layers.sh \
    /make-environment.sh /opt/fusebox /in /in/wheelhouse /wheelhouse && /split-layers.sh /opt/fusebox /layers

# What seldom changes comes first: a change of a layer changes only those after it.
FROM base AS runtime
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
LABEL org.opencontainers.image.title="fusebox cpu"
LABEL org.opencontainers.image.description="any x86-64 machine: the default, and the proof that the toolchain works"
LABEL org.opencontainers.image.licenses="Apache-2.0 AND LicenseRef-upstream"
LABEL org.opencontainers.image.base.name="python:3.11-slim-bookworm"
LABEL org.opencontainers.image.base.digest="sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b"
LABEL fusebox.target="cpu"
LABEL fusebox.python="3.11"
LABEL fusebox.cuda="none"
LABEL fusebox.driver="none"
LABEL fusebox.supported-until="2027-10"
LABEL fusebox.packages="torch 2.13.0+cpu, transformers 4.40.2, accelerate 1.10.1, torchao 0.18.0, deepspeed 0.19.8"
ARG SM=
LABEL fusebox.sm="${SM:-none}"
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["dumb-init", "--"]
CMD ["bash"]