//! Minimal HTTP client for load: one connection, one request at a time, without decoding chunked bodies.
//!
//! Invariant: a response is read to its end before the next request is sent.

use actix_web::rt::net::TcpStream;
use anyhow::{Context, Result, bail, ensure};
use std::io::ErrorKind;
use std::net::SocketAddr;

/// Maximum bytes per read.
const READ_BYTES: usize = 64 << 10;

/// Maximum size of a response head, and of a body that is quoted in an error.
const HEAD_BYTES: usize = 4 << 10;

/// End of a chunked body.
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// A connection.
pub struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// The last bytes read, as many as [`LAST_CHUNK`] has.
    tail: [u8; LAST_CHUNK.len()],
}

impl Client {
    /// Connects to a server.
    pub async fn connect(address: SocketAddr) -> Result<Client> {
        let stream = TcpStream::connect(address).await.context("cannot connect")?;
        Ok(Client { stream, buffer: vec![0; READ_BYTES], tail: [0; LAST_CHUNK.len()] })
    }

    /// Posts a JSON body and reads the head of the response. Fails unless the status is 200.
    pub async fn post(&mut self, path: &str, body: &str) -> Result<()> {
        let head = "Content-Type: application/json\r\nContent-Length:";
        let length = body.len();
        let request = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\n{head} {length}\r\n\r\n{body}");
        self.send(&request).await
    }

    /// Asks for a path and reads the head of the response. Fails unless the status is 200.
    pub async fn get(&mut self, path: &str) -> Result<()> {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")).await
    }

    /// Sends a request and reads the head of the response.
    async fn send(&mut self, request: &str) -> Result<()> {
        let mut left = request.as_bytes();
        while !left.is_empty() {
            self.stream.writable().await?;
            match self.stream.try_write(left) {
                Ok(written) => left = &left[written..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("cannot send the request"),
            }
        }
        self.tail.fill(0);
        self.read_head().await
    }

    /// Reads the head byte by byte, so that nothing of the body is consumed.
    async fn read_head(&mut self) -> Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            ensure!(head.len() < HEAD_BYTES, "the response's head is too long");
            let mut byte = [0];
            read(&self.stream, &mut byte).await?;
            head.push(byte[0]);
        }
        if !head.starts_with(b"HTTP/1.1 200 ") {
            let read = read(&self.stream, &mut self.buffer[..HEAD_BYTES]).await?;
            head.extend_from_slice(&self.buffer[..read]);
            bail!("the server rejected the request: {}", String::from_utf8_lossy(&head));
        }
        Ok(())
    }

    /// Reads more of the body. Returns the number of events that end in it, or `None` at the end of the body.
    pub async fn read_events(&mut self) -> Result<Option<u64>> {
        if self.tail == LAST_CHUNK {
            return Ok(None);
        }
        let read = read(&self.stream, &mut self.buffer).await?;
        let bytes = &self.buffer[..read];
        let kept = LAST_CHUNK.len();
        let cut = self.tail[kept - 1] == b'\n' && bytes[0] == b'\n';
        match bytes.len().checked_sub(kept) {
            Some(start) => self.tail.copy_from_slice(&bytes[start..]),
            None => {
                self.tail.rotate_left(bytes.len());
                self.tail[kept - bytes.len()..].copy_from_slice(bytes);
            }
        }
        Ok(Some(events_in(bytes) + u64::from(cut)))
    }
}

/// Reads available bytes, at least one.
async fn read(stream: &TcpStream, to: &mut [u8]) -> Result<usize> {
    loop {
        stream.readable().await?;
        match stream.try_read(to) {
            Ok(0) => bail!("the server closed the connection"),
            Ok(read) => return Ok(read),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("cannot read the response"),
        }
    }
}

/// Counts the events that end in `bytes`, by their empty lines. The JSON has no line feeds, and chunk headers
/// end in CR LF.
pub fn events_in(bytes: &[u8]) -> u64 {
    bytes.windows(2).filter(|pair| pair == b"\n\n").count() as u64
}
