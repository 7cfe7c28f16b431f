//! Authorization of requests: host names, API keys, and the origins whose web pages may send requests.
//!
//! Invariant: keys are compared in constant time, and none reaches a log or a response.

use super::App;
use super::error::ApiError;
use super::failed_keys::{FailedKeys, network};
use super::hosts::AllowedHosts;
use super::web_page;
use crate::config::{ApiKey, MetricsAccess, ServerConfig};
use crate::request::client::{Client, ClientId, ClientSettings};
use actix_cors::Cors;
use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::Method;
use actix_web::http::header::{
    AUTHORIZATION, HOST, HeaderMap, HeaderName, HeaderValue, ORIGIN, RETRY_AFTER, WWW_AUTHENTICATE,
};
use actix_web::middleware::{Condition, Next};
use actix_web::{Error, HttpMessage, HttpResponse, ResponseError, rt, web};
use anyhow::{Result, ensure};
use sha2::{Digest, Sha256};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, LazyLock, PoisonError, RwLock};
use std::time::Instant;
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

/// Maximum time for which a browser may cache the result of a preflight, in seconds.
const PREFLIGHT_MAX_AGE_S: usize = 3600;

/// Maximum length of a key in bytes.
const KEY_BYTES_MAX: usize = 256;

/// The accepted API keys and their clients, which can be replaced. Without any, all requests are accepted.
pub struct Keys(RwLock<Vec<KnownKey>>);

/// An accepted API key.
struct KnownKey {
    padded: PaddedKey,
    client: Arc<Client>,
    owner: Owner,
}

/// The owner of files and batches: an API key, by a hash that is the same after a restart. Without keys, all
/// clients together are one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Owner(pub Arc<str>);

impl Owner {
    /// Returns the owner with this key.
    pub fn with_key(key: &str) -> Owner {
        let hash = Sha256::new().chain_update("mainstem owner ").chain_update(key).finalize();
        Owner(hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into())
    }
}

impl Keys {
    /// Creates the set of accepted keys. An error names a key that is too long by its position.
    pub fn new(keys: &[ApiKey]) -> Result<Keys> {
        let mut known = Vec::with_capacity(keys.len());
        for (number, ApiKey { key, name, settings }) in (1..).zip(keys) {
            ensure!(key.len() <= KEY_BYTES_MAX, "API key {number} is longer than {KEY_BYTES_MAX} bytes");
            let name = name.as_deref().map_or_else(|| format!("key {number}").into(), Arc::from);
            let client = Client { id: client_id(key), name, settings: *settings };
            let padded = PaddedKey::new(key.as_bytes());
            known.push(KnownKey { padded, client: Arc::new(client), owner: Owner::with_key(key) });
        }
        Ok(Keys(RwLock::new(known)))
    }

    /// Accepts the keys of `other` from now on, in the place of these.
    pub fn replace(&self, other: Keys) {
        let keys = other.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = keys;
    }

    /// Returns the number of keys.
    pub fn count(&self) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Returns the client with the key of `owner`, if that is accepted. `None` for the owner without a key.
    pub fn client_of(&self, owner: &Owner) -> Option<Arc<Client>> {
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        keys.iter().find(|key| key.owner == *owner).map(|key| key.client.clone())
    }

    /// Returns the client whose key a request shows, and what it owns, if it is an accepted one. Compares
    /// every key in full, for constant time.
    fn client(&self, headers: &HeaderMap) -> Option<(Arc<Client>, Owner)> {
        let given = PaddedKey::new(shown_key(headers)?);
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let numbered = (0..).zip(keys.iter());
        let found = numbered.fold(u64::MAX, |found, (number, key)| {
            u64::conditional_select(&found, &number, key.padded.ct_eq(&given))
        });
        keys.get(usize::try_from(found).ok()?).map(|key| (key.client.clone(), key.owner.clone()))
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({})", self.count())
    }
}

/// Returns the id of a key's client: the same one after the keys were replaced.
fn client_id(key: &str) -> ClientId {
    static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    ClientId::Key(STATE.hash_one(key))
}

/// A key padded to a fixed length, so that the time of a comparison does not reveal its length.
struct PaddedKey {
    bytes: [u8; KEY_BYTES_MAX],
    len: u64,
}

impl PaddedKey {
    /// Pads a key. A longer key is truncated; its length still differs from that of every accepted key.
    fn new(key: &[u8]) -> PaddedKey {
        let mut bytes = [0; KEY_BYTES_MAX];
        let kept = key.len().min(KEY_BYTES_MAX);
        bytes[..kept].copy_from_slice(&key[..kept]);
        PaddedKey { bytes, len: key.len() as u64 }
    }
}

impl ConstantTimeEq for PaddedKey {
    fn ct_eq(&self, other: &PaddedKey) -> Choice {
        self.bytes.ct_eq(&other.bytes) & self.len.ct_eq(&other.len)
    }
}

/// Header with the key in the requests of Anthropic's clients.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Returns the key that a request shows.
fn shown_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bare = || headers.get(API_KEY).map(|key| key.as_bytes().trim_ascii());
    headers.get(AUTHORIZATION).and_then(bearer).or_else(bare)
}

/// Returns the key of a `Bearer KEY` header.
fn bearer(header: &HeaderValue) -> Option<&[u8]> {
    let (scheme, key) = header.as_bytes().split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
}

/// The rules that [`authorize`] applies, beside the configuration.
#[derive(Debug)]
pub struct Rules {
    pub keys: web::Data<Keys>,
    pub hosts: AllowedHosts,
    pub failed: FailedKeys,
}

/// Middleware that rejects requests for other hosts with 403, and those without a valid key with 401, except
/// on the open paths. If no keys are configured, it rejects cross-origin POST requests with 403: a browser
/// sends them for any page that its user visits. Accepted requests have their [`Client`] and [`Owner`] as
/// extensions.
pub async fn authorize(
    app: web::Data<App>,
    rules: web::Data<Rules>,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let client = rules.keys.client(request.headers());
    match refusal(&app, &rules, &request, client.is_some()).await {
        None => {
            let by_address = || (client_by_address(&request, app.config.clients), Owner::default());
            let (client, owner) = client.unwrap_or_else(by_address);
            request.extensions_mut().insert(client);
            request.extensions_mut().insert(owner);
            Ok(next.call(request).await?.map_into_left_body())
        }
        Some(response) => Ok(request.into_response(response).map_into_right_body()),
    }
}

/// Middleware that only rejects requests for other hosts, with 403.
pub async fn check_host(
    rules: web::Data<Rules>,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    match refused_host(&rules, request.headers()) {
        None => Ok(next.call(request).await?.map_into_left_body()),
        Some(response) => Ok(request.into_response(response).map_into_right_body()),
    }
}

/// Returns the response to a request for a host that is not allowed.
fn refused_host(rules: &Rules, headers: &HeaderMap) -> Option<HttpResponse> {
    let host = String::from_utf8_lossy(rules.hosts.find_refused(headers)?.as_bytes());
    Some(ApiError::host_not_allowed(&host).error_response())
}

/// Returns the client of a request without a valid key.
fn client_by_address(request: &ServiceRequest, settings: ClientSettings) -> Arc<Client> {
    let address = request.peer_addr().map_or(Ipv4Addr::UNSPECIFIED.into(), |peer| peer.ip());
    Client::at_address(network(address), settings)
}

/// Returns the response to a request that is refused. `has_key` is whether it shows a valid key.
async fn refusal(app: &App, rules: &Rules, request: &ServiceRequest, has_key: bool) -> Option<HttpResponse> {
    let (is_public, headers) = (rules.keys.count() == 0, request.headers());
    if let Some(response) = refused_host(rules, headers) {
        return Some(response);
    }
    let is_cross_origin_post = request.method() == Method::POST && is_cross_origin(headers);
    if is_public && is_cross_origin_post && !is_allowed_origin(&app.config.cors_origins, headers) {
        return Some(ApiError::cross_origin().error_response());
    }
    if is_public || has_key || is_open(request, &app.config) {
        return None;
    }
    // Without a key, nothing is guessed.
    if let (Some(_), Some(peer)) = (shown_key(headers), request.peer_addr()) {
        rt::time::sleep(rules.failed.delay(peer.ip(), Instant::now())).await;
    }
    let mut response = ApiError::unauthorized().error_response();
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    Some(response)
}

/// Returns whether a request needs no key: it is for load balancers, metric scrapers or the files of the web
/// page, and reveals nothing about requests.
fn is_open(request: &ServiceRequest, config: &ServerConfig) -> bool {
    let (path, is_read) = (request.path(), matches!(*request.method(), Method::GET | Method::HEAD));
    path == "/health"
        || path == "/ping"
        || path == "/metrics" && config.metrics_access == MetricsAccess::Open
        || config.web && is_read && web_page::is_file(path)
}

/// Returns whether the request's origin is allowed by the configuration.
fn is_allowed_origin(origins: &[String], headers: &HeaderMap) -> bool {
    origins == ["*"] || headers.get(ORIGIN).is_some_and(|origin| contains_origin(origins, origin))
}

fn contains_origin(origins: &[String], origin: &HeaderValue) -> bool {
    origins.iter().any(|allowed| origin.as_bytes().eq_ignore_ascii_case(allowed.as_bytes()))
}

/// Returns whether a browser sends the request for a page of another site. Pages of this machine do not
/// count.
fn is_cross_origin(headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(ORIGIN) else { return false };
    let text = |value: &HeaderValue| value.to_str().unwrap_or_default().to_ascii_lowercase();
    let origin = text(origin);
    let Some((_, site)) = origin.split_once("://") else { return true };
    let name = site.rsplit_once(':').filter(|(_, port)| !port.ends_with(']')).map_or(site, |(name, _)| name);
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let is_local = name == "localhost" || address.is_ok_and(|address| address.is_loopback());
    !is_local && headers.get(HOST).map(text).as_deref() != Some(site)
}

/// Returns middleware that allows cross-origin requests from `origins`; without any it does nothing. It
/// answers preflights itself, so it must wrap [`authorize`]: browsers send no key with preflights.
pub fn cors(origins: &[String]) -> Condition<Cors> {
    let cors = Cors::default()
        .allowed_methods([Method::GET, Method::POST, Method::DELETE, Method::OPTIONS])
        // Client libraries send headers of their own, and new ones with each version.
        .allow_any_header()
        .expose_headers([super::access::REQUEST_ID, RETRY_AFTER])
        .max_age(PREFLIGHT_MAX_AGE_S);
    let cors = if origins == ["*"] {
        cors.allow_any_origin().send_wildcard()
    } else {
        let origins = origins.to_vec();
        cors.allowed_origin_fn(move |origin, _| contains_origin(&origins, origin))
    };
    Condition::new(!origins.is_empty(), cors)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(keys: &[&str]) -> Result<Keys> {
        let settings = ClientSettings::default();
        let key = |key: &&str| ApiKey { key: key.to_string(), name: None, settings };
        Keys::new(&keys.iter().map(key).collect::<Vec<_>>())
    }

    fn client(keys: &Keys, header: &str) -> Option<Arc<Client>> {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, HeaderValue::from_str(header).unwrap());
        keys.client(&headers).map(|(client, _)| client)
    }

    #[test]
    fn a_key_is_taken_whole_or_not_at_all() {
        let longest = "k".repeat(KEY_BYTES_MAX);
        let all = ["one", "two-longer", &longest];
        let known = keys(&all).unwrap();
        for (number, key) in (1..).zip(all) {
            let found = client(&known, &format!("Bearer {key}"));
            assert_eq!(found.map(|client| client.name.to_string()), Some(format!("key {number}")));
        }
        for header in ["bearer one", "BEARER  one ", "Bearer one"] {
            assert!(client(&known, header).is_some(), "{header}");
        }
        let too_long = format!("Bearer {longest}k");
        for header in ["Bearer on", "Bearer onee", "Bearer ", "Bearer", "Basic one", "one", &too_long] {
            assert!(client(&known, header).is_none(), "{header}");
        }
    }

    /// The engine goes on counting for a client after a reload.
    #[test]
    fn a_client_is_the_same_one_after_its_keys_were_replaced() {
        let known = keys(&["one", "two"]).unwrap();
        let id = |key: &str| client(&known, &format!("Bearer {key}")).map(|client| client.id);
        let before = [id("one"), id("two")];
        assert_ne!(before[0], before[1]);
        known.replace(keys(&["zero", "two", "one"]).unwrap());
        assert_eq!([id("one"), id("two")], before);
        known.replace(keys(&["two"]).unwrap());
        assert_eq!([id("one"), id("two")], [None, before[1]]);
        let found = ["one", "two"].map(|key| known.client_of(&Owner::with_key(key)).map(|client| client.id));
        assert_eq!((found, known.client_of(&Owner::default())), ([None, before[1]], None));
        assert_ne!(Owner::with_key("one"), Owner::with_key("two"));
    }

    #[test]
    fn pages_of_other_sites_are_foreign() {
        let foreign = |origin: Option<&str>, host: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, HeaderValue::from_str(host).unwrap());
            origin
                .into_iter()
                .for_each(|o| headers.insert(ORIGIN, HeaderValue::from_str(o).unwrap()).for_each(drop));
            is_cross_origin(&headers)
        };
        let here = ["http://localhost", "http://localhost:3000", "http://127.0.0.1:8080", "https://[::1]:1"];
        for origin in
            here.map(Some).into_iter().chain([None, Some("https://Api.Example"), Some("http://api.example")])
        {
            assert!(!foreign(origin, "api.example"), "{origin:?}");
        }
        let others = [
            "https://evil.example",
            "null",
            "http://api.example:81",
            "http://localhost.evil",
            "http://[::2]",
        ];
        for origin in others {
            assert!(foreign(Some(origin), "api.example"), "{origin}");
        }
    }

    #[test]
    fn keys_are_reported_by_their_number_only() {
        let error = keys(&["short", &"secret".repeat(50)]).unwrap_err().to_string();
        assert_eq!(error, "API key 2 is longer than 256 bytes");
        assert_eq!(format!("{:?}", keys(&["secret"]).unwrap()), "Keys(1)");
    }
}
