//! TLS configuration of the listener, from two PEM files, which can be read again.
//!
//! Invariant: errors are reported when the files are read and name the file, but never contain key data.

use crate::config::TlsFiles;
use anyhow::{Context, Result, anyhow, bail};
use rustls::crypto::ring;
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{Error, ServerConfig};
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

/// The certificate with its key that new connections get. It can be replaced.
#[derive(Debug)]
pub struct Certificate(RwLock<Arc<CertifiedKey>>);

impl Certificate {
    /// Reads the certificate and the key.
    pub fn read(files: &TlsFiles) -> Result<Certificate> {
        let chain = certificates(&files.cert).context("server.tls_cert")?;
        let key = private_key(&files.key).context("server.tls_key")?;
        let (cert_file, key_file) = (files.cert.display(), files.key.display());
        let certified = CertifiedKey::from_der(chain, key, &ring::default_provider());
        let certified = certified.map_err(|error| match error {
            Error::InconsistentKeys(_) => {
                anyhow!("{key_file}: the private key does not match the certificate in {cert_file}")
            }
            Error::InvalidCertificate(error) => anyhow!("{cert_file}: the certificate is invalid: {error:?}"),
            error => anyhow!("{key_file}: the private key cannot be used with {cert_file}: {error}"),
        })?;
        Ok(Certificate(RwLock::new(Arc::new(certified))))
    }

    /// Gives new connections the certificate of `other` from now on.
    pub fn replace(&self, other: Certificate) {
        let certified = other.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = certified;
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// Returns the server configuration for TLS 1.2 and 1.3 with a certificate.
pub fn server_config(certificate: Arc<Certificate>) -> Result<ServerConfig> {
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .context("TLS cannot be set up")?
        .with_no_client_auth()
        .with_cert_resolver(certificate);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Reads the certificate chain, in the file's order.
fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let pem = read(file)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match found {
        Ok(chain) if !chain.is_empty() => Ok(chain),
        Ok(_) if PrivateKeyDer::from_pem_slice(&pem).is_ok() => {
            bail!("{}: contains a private key, but no certificate", file.display())
        }
        Ok(_) => bail!("{}: contains no certificate (BEGIN CERTIFICATE)", file.display()),
        Err(error) => bail!("{}: not a PEM file: {error}", file.display()),
    }
}

fn private_key(file: &Path) -> Result<PrivateKeyDer<'static>> {
    let pem = read(file)?;
    let file = file.display();
    PrivateKeyDer::from_pem_slice(&pem).map_err(|error| match error {
        PemError::NoItemsFound if CertificateDer::from_pem_slice(&pem).is_ok() => {
            anyhow!("{file}: contains a certificate, but no private key")
        }
        PemError::NoItemsFound => {
            anyhow!("{file}: contains no unencrypted private key (BEGIN PRIVATE KEY)")
        }
        // The parser's own message may quote parts of the key.
        _ => anyhow!("{file}: the private key is invalid"),
    })
}

fn read(file: &Path) -> Result<Vec<u8>> {
    std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    fn pems() -> (String, String) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_string()]).unwrap();
        (made.cert.pem(), made.signing_key.serialize_pem())
    }

    #[test]
    fn what_is_wrong_is_reported_by_file() {
        let folder = Scratch::new();
        let ((cert, key), (_, other_key)) = (pems(), pems());
        let broken_key = key.replacen("MI", "!!", 1);
        let junk_cert = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        for (name, content) in [
            ("cert", cert.as_str()),
            ("key", &key),
            ("other", &other_key),
            ("broken", &broken_key),
            ("junk", junk_cert),
            ("empty", ""),
        ] {
            folder.write(name, content.as_bytes());
        }
        let files =
            |cert: &str, key: &str| TlsFiles { cert: folder.path().join(cert), key: folder.path().join(key) };
        assert!(server_config(Arc::new(Certificate::read(&files("cert", "key")).unwrap())).is_ok());
        for (cert, key, parts) in [
            ("missing", "key", ["cannot read", "missing"]),
            ("cert", "missing", ["cannot read", "missing"]),
            ("empty", "key", ["empty: ", "no certificate"]),
            ("cert", "empty", ["empty: ", "no unencrypted private key"]),
            ("key", "cert", ["key: ", "a private key, but no certificate"]),
            ("cert", "cert", ["cert: ", "a certificate, but no private key"]),
            ("cert", "other", ["other: ", "does not match the certificate"]),
            ("cert", "broken", ["broken: ", "key is invalid"]),
            ("junk", "key", ["junk: ", "the certificate is invalid"]),
        ] {
            let error = format!("{:#}", Certificate::read(&files(cert, key)).unwrap_err());
            assert!(parts.iter().all(|part| error.contains(part)), "{cert} {key}: {error}");
        }
    }
}
