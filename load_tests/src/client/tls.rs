//! TLS sessions, verified against the system's CA certificates and those of an optional file.
//!
//! Invariant: no connection is made without verifying the server certificate.

use std::{io, net::IpAddr, path::Path, sync::Arc};

use anyhow::{Context, ensure};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};
use url::{Host, Url};

/// The TLS configuration for one server.
#[derive(Clone)]
pub struct Tls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tls({})", self.name.to_str())
    }
}

impl Tls {
    /// Creates the configuration for the server at `url`, trusting the certificates of the PEM file `ca` in
    /// addition to the system's.
    pub fn new(url: &Url, ca: Option<&Path>) -> anyhow::Result<Self> {
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots(ca)?)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), name: name(url)? })
    }

    /// Performs the TLS handshake on a TCP connection.
    pub async fn handshake(&self, tcp: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        self.connector.connect(self.name.clone(), tcp).await
    }
}

/// Loads the system's certificates, as far as they are readable, and those of the file.
fn roots(ca: Option<&Path>) -> anyhow::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(file) = ca {
        let count = roots.len();
        add_file(&mut roots, file)
            .with_context(|| format!("reading the certificates of {}", file.display()))?;
        ensure!(roots.len() > count, "{} contains no certificate", file.display());
    }
    Ok(roots)
}

fn add_file(roots: &mut RootCertStore, file: &Path) -> anyhow::Result<()> {
    for certificate in CertificateDer::pem_file_iter(file)? {
        roots.add(certificate?)?;
    }
    Ok(())
}

fn name(url: &Url) -> anyhow::Result<ServerName<'static>> {
    Ok(match url.host().context("the host is missing")? {
        Host::Domain(name) => {
            ServerName::try_from(name.to_string()).context("the host is not a valid certificate name")?
        }
        Host::Ipv4(address) => IpAddr::from(address).into(),
        Host::Ipv6(address) => IpAddr::from(address).into(),
    })
}
