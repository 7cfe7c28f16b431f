//! The leanest HTTP client that can keep a server busy: one connection, one request after the other, chunks that
//! are not unwrapped.
//!
//! Invariant: a response is read to its end before the next request is sent.

use actix_web::rt::net::TcpStream;
use anyhow::{Context, Result, bail, ensure};
use std::io::ErrorKind;
use std::net::SocketAddr;

/// Bytes read at a time.
const READ_BYTES: usize = 64 << 10;

/// Longest head of a response, and of an answer that is shown as an error.
const HEAD_BYTES: usize = 4 << 10;

/// What ends a chunked body.
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// A connection.
pub struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// The last bytes of what was read, as many as end a body.
    tail: [u8; LAST_CHUNK.len()],
}

impl Client {
    pub async fn connect(address: SocketAddr) -> Result<Client> {
        let stream = TcpStream::connect(address).await.context("cannot connect")?;
        Ok(Client { stream, buffer: vec![0; READ_BYTES], tail: [0; LAST_CHUNK.len()] })
    }

    /// Posts a JSON body and reads the response's first line, which must be a success.
    pub async fn post(&mut self, path: &str, body: &str) -> Result<()> {
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
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

    /// Reads the head byte for byte, so that nothing of the body is taken with it.
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
            bail!("the server refuses: {}", String::from_utf8_lossy(&head));
        }
        Ok(())
    }

    /// Reads on in the body; the number of events that end there, or `None` at its end.
    pub async fn read_on(&mut self) -> Result<Option<u64>> {
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

/// Reads what there is, at least one byte.
async fn read(stream: &TcpStream, to: &mut [u8]) -> Result<usize> {
    loop {
        stream.readable().await?;
        match stream.try_read(to) {
            Ok(0) => bail!("the server hung up"),
            Ok(read) => return Ok(read),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("cannot read the response"),
        }
    }
}

/// Events that end in `bytes`: their empty lines. JSON has no line ends, and those of chunks are not empty.
pub fn events_in(bytes: &[u8]) -> u64 {
    bytes.windows(2).filter(|pair| pair == b"\n\n").count() as u64
}
