# A small image that serves the demo model that is built in:
#   docker build -t mainstem . && docker run --rm -p 8080:8080 mainstem
# or another, such as a folder of this machine:
#   docker run --rm -p 8080:8080 -v /srv/models:/models:ro mainstem serve /models/mine --host 0.0.0.0
FROM rust:1.95-slim-bookworm AS build
WORKDIR /source
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/source/target \
    cargo build --release --locked --bin mainstem \
    && cp target/release/mainstem /mainstem

# The same Debian as above. The hub's certificates are in the program.
FROM debian:bookworm-slim
RUN useradd --system --create-home --home-dir /var/lib/mainstem mainstem
COPY --from=build /mainstem /usr/local/bin/mainstem
USER mainstem
WORKDIR /var/lib/mainstem
EXPOSE 8080
# There is nothing in here to ask /health with: that is for whoever runs the container (a Kubernetes probe, a load
# balancer), and so there is no HEALTHCHECK.
ENTRYPOINT ["/usr/local/bin/mainstem"]
# 127.0.0.1, the default, would be the container's own.
CMD ["serve", "--host", "0.0.0.0"]
