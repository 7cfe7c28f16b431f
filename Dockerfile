# A small image that serves the built-in demo model, to clients with a key:
#   docker build -t mainstem . && docker run --rm -p 8080:8080 -e MAINSTEM_SERVER_API_KEYS=a-secret mainstem
# or another model, from a hub, whose files stay in the volume `models`, or a folder on this machine:
#   docker run --rm -p 8080:8080 -e MAINSTEM_SERVER_API_KEYS=a-secret -v models:/var/cache/mainstem mainstem \
#       serve hf:owner/name --host 0.0.0.0
#   docker run --rm -p 8080:8080 -e MAINSTEM_SERVER_API_KEYS=a-secret -v /srv/models:/models:ro mainstem \
#       serve /models/mine --host 0.0.0.0
FROM rust:1.95-slim-bookworm AS build
WORKDIR /source
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/source/target \
    cargo build --release --locked --bin mainstem \
    && cp target/release/mainstem /mainstem

# The same Debian release as above. The root certificates for the hub are built into the program.
FROM debian:bookworm-slim
RUN useradd --system --create-home --home-dir /var/lib/mainstem mainstem \
    && install --directory --owner mainstem /var/cache/mainstem
COPY --from=build /mainstem /usr/local/bin/mainstem
USER mainstem
ENV MAINSTEM_HUB_CACHE=/var/cache/mainstem MAINSTEM_TIERS_DISK_PATH=/var/cache/mainstem/weights
VOLUME /var/cache/mainstem
# Refused at start, so that no port is open without a key: set another one.
ENV MAINSTEM_SERVER_API_KEYS=change-me
WORKDIR /var/lib/mainstem
EXPOSE 8080
# The image contains no HTTP client, so there is no HEALTHCHECK. Query /health from outside, for example with a
# Kubernetes probe or a load balancer.
ENTRYPOINT ["/usr/local/bin/mainstem"]
# The default, 127.0.0.1, is reachable only from within the container.
CMD ["serve", "--host", "0.0.0.0"]
