//! Query parameters of lists.

use super::tables::Page;
use crate::server::error::ApiError;
use actix_web::HttpRequest;
use actix_web::web::Query;
use std::collections::HashMap;

/// The query parameters of a list.
#[derive(Debug)]
pub struct ListQuery {
    pub page: Page,
    pub purpose: Option<String>,
}

impl ListQuery {
    /// Parses the query of a request for a list with at most `most` entries in a page, and `default` if it
    /// does not say. Parameters that are unknown are ignored.
    pub fn parse(request: &HttpRequest, default: i64, most: i64) -> Result<ListQuery, ApiError> {
        let query = Query::<HashMap<String, String>>::from_query(request.query_string());
        let query = query.map_err(|error| ApiError::malformed(format!("the query is invalid: {error}")))?;
        let given = |name: &str| query.get(name).filter(|value| !value.is_empty());
        let limit = match given("limit") {
            None => default,
            Some(text) => text.parse().ok().filter(|limit| (1..=most).contains(limit)).ok_or_else(|| {
                ApiError::invalid("limit", format!("'limit' must be an integer from 1 to {most}"))
            })?,
        };
        let is_ascending = match given("order").map_or("desc", String::as_str) {
            "asc" => true,
            "desc" => false,
            _ => return Err(ApiError::invalid("order", "'order' must be \"asc\" or \"desc\"")),
        };
        let page = Page { after: given("after").cloned(), limit, is_ascending };
        Ok(ListQuery { page, purpose: given("purpose").cloned() })
    }

    /// Returns the error for an entry `after` that does not exist.
    pub fn unknown_after(&self) -> ApiError {
        let after = self.page.after.as_deref().unwrap_or_default();
        let shown: String = after.chars().take(100).collect();
        ApiError::invalid("after", format!("'after' is '{shown}', which is not in the list"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::test::TestRequest;

    fn parse(query: &str) -> Result<ListQuery, String> {
        let request = TestRequest::with_uri(&format!("/v1/files?{query}")).to_http_request();
        ListQuery::parse(&request, 20, 100).map_err(|error| error.to_string())
    }

    #[test]
    fn wrong_parameters_are_named() {
        let ListQuery { page, purpose } = parse("after=a%20b&limit=3&order=asc&purpose=batch&x=1").unwrap();
        assert_eq!(page, Page { after: Some("a b".into()), limit: 3, is_ascending: true });
        assert_eq!(purpose.as_deref(), Some("batch"));
        let page = parse("after=&limit=").unwrap().page;
        assert_eq!(page, Page { after: None, limit: 20, is_ascending: false });
        for (query, named) in [
            ("limit=0", "'limit'"),
            ("limit=101", "'limit'"),
            ("limit=x", "'limit'"),
            ("order=up", "'order'"),
        ] {
            assert!(parse(query).unwrap_err().starts_with(named), "{query}");
        }
    }
}
