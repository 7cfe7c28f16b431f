//! TLS: from two PEM files to what the listener needs.
//!
//! Invariant: what is wrong with the files is told at start, by file, and nothing of a key is told.

use crate::config::TlsFiles;
use anyhow::{Context, Result, anyhow, bail};
use rustls::crypto::ring;
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{Error, ServerConfig};
use std::path::Path;
use std::sync::Arc;

/// The listener's side of TLS 1.2 and 1.3.
pub fn server_config(files: &TlsFiles) -> Result<ServerConfig> {
    let (chain, key) = (certificates(&files.cert)?, private_key(&files.key)?);
    let (cert_file, key_file) = (files.cert.display(), files.key.display());
    ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .context("TLS cannot be set up")?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| match error {
            Error::InconsistentKeys(_) => {
                anyhow!("{key_file}: the key does not belong to the certificate in {cert_file}")
            }
            Error::InvalidCertificate(error) => anyhow!("{cert_file}: the certificate is broken: {error:?}"),
            error => anyhow!("{key_file}: the key cannot be used with {cert_file}: {error}"),
        })
}

/// The certificate and those between it and a root, in the file's order.
fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let pem = read(file)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match found {
        Ok(chain) if !chain.is_empty() => Ok(chain),
        Ok(_) if PrivateKeyDer::from_pem_slice(&pem).is_ok() => {
            bail!("{}: there is no certificate in it, but a private key", file.display())
        }
        Ok(_) => bail!("{}: there is no certificate in it (BEGIN CERTIFICATE)", file.display()),
        Err(error) => bail!("{}: not a PEM file: {error}", file.display()),
    }
}

fn private_key(file: &Path) -> Result<PrivateKeyDer<'static>> {
    let pem = read(file)?;
    let file = file.display();
    PrivateKeyDer::from_pem_slice(&pem).map_err(|error| match error {
        PemError::NoItemsFound if CertificateDer::from_pem_slice(&pem).is_ok() => {
            anyhow!("{file}: there is no private key in it, but a certificate")
        }
        PemError::NoItemsFound => {
            anyhow!("{file}: there is no unencrypted private key in it (BEGIN PRIVATE KEY)")
        }
        // The reader's own words may quote what it stumbled over.
        _ => anyhow!("{file}: the private key in it is broken"),
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
    fn what_is_wrong_is_told_by_file() {
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
        assert!(server_config(&files("cert", "key")).is_ok());
        for (cert, key, parts) in [
            ("missing", "key", ["cannot read", "missing"]),
            ("cert", "missing", ["cannot read", "missing"]),
            ("empty", "key", ["empty: ", "no certificate"]),
            ("cert", "empty", ["empty: ", "no unencrypted private key"]),
            ("key", "cert", ["key: ", "no certificate in it, but a private key"]),
            ("cert", "cert", ["cert: ", "no private key in it, but a certificate"]),
            ("cert", "other", ["other: ", "does not belong to the certificate"]),
            ("cert", "broken", ["broken: ", "is broken"]),
            ("junk", "key", ["junk: ", "the certificate is broken"]),
        ] {
            let error = format!("{:#}", server_config(&files(cert, key)).unwrap_err());
            assert!(parts.iter().all(|part| error.contains(part)), "{cert} {key}: {error}");
        }
    }
}
