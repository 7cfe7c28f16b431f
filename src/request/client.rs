//! The clients of requests: who sent a request, and what the server grants them.
//!
//! Invariant: this is plain data, and nothing in it reveals an API key.

use std::net::IpAddr;
use std::sync::{Arc, LazyLock};

/// Maximum weight of a client.
pub const WEIGHT_MAX: u32 = 1000;

/// The class of a request. Requests of an earlier class go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Someone waits for the answer.
    Interactive,
    /// Work that may wait while there are interactive requests.
    Batch,
}

impl Class {
    /// All classes, the first one first.
    pub const ALL: [Class; 2] = [Class::Interactive, Class::Batch];

    /// Returns its name in the configuration and in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Class::Interactive => "interactive",
            Class::Batch => "batch",
        }
    }
}

/// Identifies a client for as long as the process runs, whatever its settings become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClientId {
    /// The process itself.
    Local,
    /// A client with an API key, by a hash of the key.
    Key(u64),
    /// A client without an API key, by its address, or its network of 64 bits (IPv6).
    Address(IpAddr),
}

/// The settings of a client: its part of the server, and its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientSettings {
    /// The class of its requests, unless they ask for a later one.
    pub class: Class,
    /// Its part of the server relative to that of others, from 1 to [`WEIGHT_MAX`].
    pub weight: u32,
    /// Whether its requests may go before others of their class.
    pub may_prioritize: bool,
    /// Maximum number of running sequences; further ones wait. `None` for no limit.
    pub max_sequences: Option<usize>,
    /// Maximum number of computed and generated tokens per minute; `None` for no limit.
    pub tokens_per_minute: Option<u64>,
    /// Maximum number of requests per minute; `None` for no limit.
    pub requests_per_minute: Option<u64>,
}

impl Default for ClientSettings {
    /// Interactive, with weight 1 and without limits.
    fn default() -> ClientSettings {
        ClientSettings {
            class: Class::Interactive,
            weight: 1,
            may_prioritize: false,
            max_sequences: None,
            tokens_per_minute: None,
            requests_per_minute: None,
        }
    }
}

/// The client of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    pub id: ClientId,
    /// Its name in the log; never its key.
    pub name: Arc<str>,
    pub settings: ClientSettings,
}

impl Client {
    /// Returns the client of requests that the process makes itself.
    pub fn local() -> Arc<Client> {
        static LOCAL: LazyLock<Arc<Client>> = LazyLock::new(|| {
            let settings = ClientSettings { may_prioritize: true, ..ClientSettings::default() };
            Arc::new(Client { id: ClientId::Local, name: "local".into(), settings })
        });
        LOCAL.clone()
    }

    /// Returns the client of batch jobs that the process runs itself: [`Client::local`] in the later class.
    pub fn local_batch() -> Arc<Client> {
        let local = Client::local();
        let settings = ClientSettings { class: Class::Batch, ..local.settings };
        Arc::new(Client { settings, ..Client::clone(&local) })
    }

    /// Returns the client at an address, of IPv6 the first one of its network.
    pub fn at_address(network: IpAddr, settings: ClientSettings) -> Arc<Client> {
        Arc::new(Client { id: ClientId::Address(network), name: network.to_string().into(), settings })
    }
}
