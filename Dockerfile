# delayd in a container. It runs `delayd up`; give another command to run another program (docs/deploy.md).
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE pyspark_delayd.py ./
COPY delayd ./delayd
COPY meta ./meta
COPY realtime ./realtime
COPY cli ./cli
COPY spark ./spark
RUN python -m venv /opt/delayd \
    && /opt/delayd/bin/pip install --no-cache-dir --disable-pip-version-check ".[gateway]"

FROM python:${PYTHON}-slim
# The number must stay: users who mount a directory of the host give it to this user.
RUN useradd --system --uid 10740 --user-group --home-dir /var/lib/delayd --shell /usr/sbin/nologin delayd \
    && install -d -o delayd -g delayd -m 0750 /var/lib/delayd
COPY --from=build /opt/delayd /opt/delayd
# With the secret the health check needs no token.
ENV PATH=/opt/delayd/bin:$PATH DELAYD_SECRET_FILE=/var/lib/delayd/cluster.secret
USER delayd
WORKDIR /var/lib/delayd
VOLUME /var/lib/delayd
EXPOSE 7400 7401 7402 7403
# The first SIGTERM begins an orderly stop of at most seven seconds; a second one would end it at once.
STOPSIGNAL SIGTERM
# Healthy while meta answers and has just heard from the delay server and the realtime server.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 \
    CMD test "$(delayd servers --format csv | grep -c ,true,)" -ge 2
ENTRYPOINT ["delayd"]
# Meta tells clients to connect to 127.0.0.1. That is right for programs on the host that publishes these ports; for
# others, give the name under which they reach the container, and --require-token in place of --insecure.
CMD ["up", "--data", "/var/lib/delayd", "--host", "0.0.0.0", "--advertise-host", "127.0.0.1", "--gateway-host", "0.0.0.0", "--insecure"]
