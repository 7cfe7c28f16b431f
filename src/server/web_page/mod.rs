//! The web page, to chat in and to watch requests in flight: its files, which are compiled in.
//!
//! Invariant: the page loads nothing from other hosts and runs no inline script or style, which its headers
//! forbid, too; and it is a client of the API like others.

use actix_web::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use actix_web::{HttpRequest, HttpResponse};

/// A file of the page.
struct PageFile {
    path: &'static str,
    content_type: &'static str,
    text: &'static str,
}

/// Lists a file of this folder, which is served at `web/NAME`.
macro_rules! file {
    ($name:literal, $content_type:literal) => {
        PageFile {
            path: concat!("/web/", $name),
            content_type: concat!($content_type, "; charset=utf-8"),
            text: include_str!($name),
        }
    };
}

static INDEX: PageFile =
    PageFile { path: "/", content_type: "text/html; charset=utf-8", text: include_str!("index.html") };

static FILES: [PageFile; 15] = [
    file!("style.css", "text/css"),
    file!("icon.svg", "image/svg+xml"),
    file!("app.js", "text/javascript"),
    file!("api.js", "text/javascript"),
    file!("chart.js", "text/javascript"),
    file!("chat.js", "text/javascript"),
    file!("completion.js", "text/javascript"),
    file!("conversation.js", "text/javascript"),
    file!("dom.js", "text/javascript"),
    file!("inflight.js", "text/javascript"),
    file!("markdown.js", "text/javascript"),
    file!("message.js", "text/javascript"),
    file!("settings.js", "text/javascript"),
    file!("storage.js", "text/javascript"),
    file!("store.js", "text/javascript"),
];

/// Everything that the page may do: run and show its own files, and ask this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Returns the paths of the page.
pub fn paths() -> impl Iterator<Item = &'static str> {
    std::iter::once(&INDEX).chain(&FILES).map(|file| file.path)
}

/// Returns whether a path is that of a file of the page.
pub fn is_file(path: &str) -> bool {
    paths().any(|file| file == path)
}

/// Handles `GET` of the page's files.
pub async fn handle(request: HttpRequest) -> HttpResponse {
    let matched = request.match_pattern();
    let file = FILES.iter().find(|file| Some(file.path) == matched.as_deref()).unwrap_or(&INDEX);
    HttpResponse::Ok()
        .insert_header((CONTENT_TYPE, file.content_type))
        .insert_header((CONTENT_SECURITY_POLICY, POLICY))
        .insert_header((X_CONTENT_TYPE_OPTIONS, "nosniff"))
        .insert_header((REFERRER_POLICY, "no-referrer"))
        // Another version of the program may have other files.
        .insert_header((CACHE_CONTROL, "no-cache"))
        .body(file.text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_small_and_names_no_other_host() {
        let bytes: usize = std::iter::once(&INDEX).chain(&FILES).map(|file| file.text.len()).sum();
        assert!(bytes < 200_000, "{bytes} bytes");
        for file in std::iter::once(&INDEX).chain(&FILES) {
            let text = file.text.replace("http://www.w3.org/2000/svg", "");
            for address in ["://", "\"//", "'//", "url("] {
                assert!(!text.contains(address), "{} has {address}", file.path);
            }
        }
    }

    /// A module that is imported, but not listed, would be a 404 in the browser.
    #[test]
    fn every_file_that_the_page_refers_to_is_served() {
        let names = FILES.iter().flat_map(|file| {
            let imports = file.text.split("from \"./").skip(1);
            imports.filter_map(|rest| rest.split('"').next()).map(|name| format!("/web/{name}"))
        });
        let linked = INDEX.text.split("\"web/").skip(1).filter_map(|rest| rest.split('"').next());
        let linked = linked.map(|name| format!("/web/{name}"));
        for name in names.chain(linked) {
            assert!(is_file(&name), "{name}");
        }
        assert!(!is_file("/web/"));
    }
}
