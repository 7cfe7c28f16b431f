//! Accepted connections: their limits, the TLS handshake, and the HTTP service behind them.
//!
//! Invariant: every connection is counted from when it is accepted, TLS handshakes included, and is closed if
//! [`Connections`] says so. Nothing here waits for one connection before it accepts another.

use super::body;
use super::connections::{Connection, Connections, Refusal};
use crate::telemetry;
use actix_http::body::MessageBody;
use actix_http::{HttpService, Protocol, Request, Response};
use actix_server::ServerBuilder;
use actix_service::{
    IntoServiceFactory, Service, ServiceFactory, ServiceFactoryExt, fn_factory, fn_service, map_config,
};
use actix_web::dev::AppConfig;
use actix_web::rt::net::{ActixStream, Ready, TcpStream};
use socket2::SockRef;
use std::fmt;
use std::io::{self, IoSlice};
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::select;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Maximum time of a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum time for the first request's head to arrive.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum time for a client to close its side of a connection that the server closes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of reads of what it sends meanwhile, of at most 1 KiB each.
const LINGERING_READS: usize = 64;

/// Maximum number of connections that are not accepted and wait to be closed: fewer than the open files that
/// are spared for connections beyond the limit.
const LINGERING_MAX: usize = 16;

/// Response to connections that are not accepted, which is sent unless they use TLS.
const BUSY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\
    Connection: close\r\n\r\n";

/// Accepts connections of a listener.
#[derive(Clone)]
pub struct Acceptor {
    connections: Arc<Connections>,
    tls: Option<TlsAcceptor>,
    /// Time for which an idle connection stays open.
    keep_alive: Duration,
    /// Permits to wait until clients that are not accepted close their connections.
    lingering: Arc<Semaphore>,
}

/// Adds a listener with the application that `new_app` makes to a server.
pub fn add_listener<F, I, S, B>(
    builder: ServerBuilder,
    listener: TcpListener,
    acceptor: Acceptor,
    new_app: F,
) -> io::Result<ServerBuilder>
where
    F: Fn() -> I + Send + Clone + 'static,
    I: IntoServiceFactory<S, Request>,
    S: ServiceFactory<Request, Config = AppConfig> + 'static,
    S::Error: Into<actix_web::Error> + 'static,
    S::InitError: fmt::Debug,
    S::Response: Into<Response<B>> + 'static,
    <S::Service as Service<Request>>::Future: 'static,
    S::Service: 'static,
    B: MessageBody + 'static,
{
    let address = listener.local_addr()?;
    let shutdown = builder.graceful_shutdown_signal();
    builder.listen("http", listener, move || {
        let (acceptor, shutdown) = (acceptor.clone(), shutdown.clone());
        let app = new_app().into_factory().map_err(|error: S::Error| error.into().error_response());
        let service = HttpService::build()
            .graceful_shutdown_signal(move || {
                let shutdown = shutdown.clone();
                async move { shutdown.notified().await }
            })
            .keep_alive(acceptor.keep_alive)
            .client_request_timeout(HEAD_TIMEOUT)
            .client_disconnect_timeout(CLOSE_TIMEOUT)
            // A client that disconnects must drop the handler of its request.
            .h1_allow_half_closed(false)
            .local_addr(address)
            .on_connect_ext(|stream: &Stream, data| _ = data.insert(stream.connection.clone()))
            .finish(map_config(app, |()| AppConfig::default()));
        let service = Rc::new(service);
        fn_factory(move || {
            let (acceptor, service) = (acceptor.clone(), service.clone());
            async move {
                let http = Rc::new(service.new_service(()).await?);
                Ok::<_, ()>(fn_service(move |socket: TcpStream| {
                    let (acceptor, http) = (acceptor.clone(), http.clone());
                    async move {
                        acceptor.serve(socket, &*http).await;
                        Ok::<_, ()>(())
                    }
                }))
            }
        })
    })
}

impl Acceptor {
    /// Creates an acceptor, with TLS if there is an acceptor for it. Idle connections stay open for
    /// `keep_alive`.
    pub fn new(connections: Arc<Connections>, tls: Option<TlsAcceptor>, keep_alive: Duration) -> Acceptor {
        Acceptor { connections, tls, keep_alive, lingering: Arc::new(Semaphore::new(LINGERING_MAX)) }
    }

    /// Serves a connection until it is closed, by `http`.
    async fn serve<S>(&self, socket: TcpStream, http: &S)
    where
        S: Service<(Stream, Protocol, Option<SocketAddr>)>,
    {
        // Without an address, the connection is gone already.
        let Ok(peer) = socket.peer_addr() else { return };
        let connection = match self.connections.accept(peer.ip()) {
            Ok(connection) => Arc::new(connection),
            Err(refusal) => return self.refuse(socket, refusal).await,
        };
        let exchange = async {
            let io = match &self.tls {
                None => Io::Plain(socket),
                Some(tls) => match timeout(HANDSHAKE_TIMEOUT, tls.accept(socket)).await {
                    Ok(Ok(stream)) => Io::Tls(Box::new(stream)),
                    Ok(Err(_)) | Err(_) => return,
                },
            };
            let stream = Stream { io, connection: connection.clone() };
            // An error of a connection concerns nobody else, and has ended it.
            _ = http.call((stream, Protocol::Http1, Some(peer))).await;
        };
        // Within an idle time, a request may begin and its body arrive.
        let idle_max = self.keep_alive.saturating_add(HEAD_TIMEOUT + body::TIMEOUT);
        select! {
            () = exchange => {}
            () = connection.closed(idle_max) => {}
        }
    }

    /// Closes a connection that is not accepted.
    async fn refuse(&self, mut socket: TcpStream, refusal: Refusal) {
        telemetry::CONNECTIONS_CLOSED.count([match refusal {
            Refusal::Full => "full",
            Refusal::Address => "address",
        }]);
        if self.tls.is_some() {
            return;
        }
        // A new socket has space for this. Tokio does not know yet that it can be written to.
        _ = SockRef::from(&socket).send(BUSY);
        // Closing with unread bytes resets the connection, and the client might not see why. If there are
        // many of these, others are closed at once.
        let Ok(_lingering) = self.lingering.try_acquire() else { return };
        _ = SockRef::from(&socket).shutdown(Shutdown::Write);
        let mut buffer = [0; 1024];
        let read = async {
            for _ in 0..LINGERING_READS {
                let Ok(1..) = socket.read(&mut buffer).await else { return };
            }
        };
        _ = timeout(CLOSE_TIMEOUT, read).await;
    }
}

/// The bytes of an accepted connection, with the connection, which ends with it.
struct Stream {
    io: Io,
    connection: Arc<Connection>,
}

enum Io {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    fn reader(self: Pin<&mut Self>) -> Pin<&mut (dyn AsyncRead + Unpin)> {
        match &mut self.get_mut().io {
            Io::Plain(socket) => Pin::new(socket),
            Io::Tls(stream) => Pin::new(stream),
        }
    }

    fn writer(self: Pin<&mut Self>) -> Pin<&mut (dyn AsyncWrite + Unpin)> {
        match &mut self.get_mut().io {
            Io::Plain(socket) => Pin::new(socket),
            Io::Tls(stream) => Pin::new(stream),
        }
    }

    fn socket(&self) -> &TcpStream {
        match &self.io {
            Io::Plain(socket) => socket,
            Io::Tls(stream) => stream.get_ref().0,
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.reader().poll_read(cx, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(self.as_mut().writer().poll_write(cx, bytes));
        self.connection.touch();
        Poll::Ready(written)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.writer().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.writer().poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(self.as_mut().writer().poll_write_vectored(cx, parts));
        self.connection.touch();
        Poll::Ready(written)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            Io::Plain(socket) => socket.is_write_vectored(),
            Io::Tls(stream) => stream.is_write_vectored(),
        }
    }
}

impl ActixStream for Stream {
    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<Ready>> {
        ActixStream::poll_read_ready(self.socket(), cx)
    }

    fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<Ready>> {
        ActixStream::poll_write_ready(self.socket(), cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;
    use tokio::{join, select};

    async fn write(stream: &mut Stream, is_vectored: bool) {
        let bytes = [0; 64 << 10];
        let written = match is_vectored {
            true => stream.write_vectored(&[IoSlice::new(&bytes)]).await,
            false => stream.write(&bytes).await,
        };
        assert!(written.unwrap() > 0);
    }

    /// A new connection does not take the place of one whose client reads the rest of its response.
    #[actix_web::test]
    async fn a_client_that_takes_its_response_is_not_cut_off() {
        for is_vectored in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap());
            let (client, accepted) = join!(client, listener.accept());
            let (mut client, (socket, peer)) = (client.unwrap(), accepted.unwrap());
            let all = Connections::new(2, None);
            let accept = || Arc::new(all.accept(peer.ip()).unwrap());
            let mut stream = Stream { io: Io::Plain(socket), connection: accept() };
            while write(&mut stream, is_vectored).now_or_never().is_some() {}
            let second = accept();
            let mut buffer = [0; 4096];
            select! {
                () = write(&mut stream, is_vectored) => {}
                () = async { while client.read(&mut buffer).await.unwrap() > 0 {} } => unreachable!(),
            }
            let _third = accept();
            let is_closed = [&stream.connection, &second]
                .map(|connection| connection.closed(Duration::from_secs(3600)).now_or_never().is_some());
            assert_eq!(is_closed, [false, true]);
        }
    }
}
