# A small image that serves the built-in demo model:
#   docker build -t mainstem . && docker run --rm -p 8080:8080 mainstem
# or another model, such as a folder on this machine:
#   docker run --rm -p 8080:8080 -v /srv/models:/models:ro mainstem serve /models/mine --host 0.0.0.0
FROM rust:1.95-slim-bookworm AS build
WORKDIR /source
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/source/target \
    cargo build --release --locked --bin mainstem \
    && cp target/release/mainstem /mainstem

# The same Debian release as above. The root certificates for the hub are built into the program.
FROM debian:bookworm-slim
RUN useradd --system --create-home --home-dir /var/lib/mainstem mainstem
COPY --from=build /mainstem /usr/local/bin/mainstem
USER mainstem
WORKDIR /var/lib/mainstem
EXPOSE 8080
# The image contains no HTTP client, so there is no HEALTHCHECK. Query /health from outside, for example with a
# Kubernetes probe or a load balancer.
ENTRYPOINT ["/usr/local/bin/mainstem"]
# The default, 127.0.0.1, is reachable only from within the container.
CMD ["serve", "--host", "0.0.0.0"]
