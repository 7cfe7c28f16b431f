//! Names of the model in requests and in the list of models.

use super::test_server::{TestServer, answer};
use crate::config::ServerConfig;
use serde_json::{Value, json};

fn with_names(config: &mut ServerConfig) {
    config.model_names = ["gpt-4o", "tiny", "a/b"].map(Into::into).to_vec();
}

#[actix_web::test]
async fn the_model_has_each_of_its_names_once() {
    let mut server = TestServer::with_config(None, with_names);
    let models = server.get("/v1/models").await.json();
    let ids: Vec<_> = models["data"].as_array().unwrap().iter().map(|card| &card["id"]).collect();
    assert_eq!(ids, ["tiny", "gpt-4o", "a/b"]);
    for name in ["tiny", "gpt-4o", "a/b", "gpt-4o:latest"] {
        let card = server.get(&format!("/v1/models/{name}")).await;
        assert_eq!((card.status, &card.json()["id"]), (200, &json!(name)));
        let (_, response) = server.exchange(json!({"model": name, "prompt": "p"}), answer("x")).await;
        assert_eq!(response.json()["model"], "tiny", "responses have the first name");
    }
    for name in ["gpt-4", "tiny:7b", ""] {
        let refused = server.post(&json!({"model": name, "prompt": "p"}).to_string()).await;
        assert_eq!((refused.status, refused.error().0.as_str()), (404, "model_not_found"), "{name}");
    }
    assert_eq!(server.get("/v1/models/gpt-4").await.status, 404);
    server.close().await;
}

#[actix_web::test]
async fn any_name_is_accepted_if_the_server_is_told_so() {
    let mut server = TestServer::with_config(None, |config| config.accept_any_model = true);
    for name in ["gpt-4", "tiny:7b", ""] {
        let (_, response) = server.exchange(json!({"model": name, "prompt": "p"}), answer("x")).await;
        assert_eq!((response.status, &response.json()["model"]), (200, &json!("tiny")), "{name}");
    }
    let refused = server.post(&json!({"model": 7, "prompt": "p"}).to_string()).await;
    assert_eq!((refused.status, refused.error().1), (400, Value::from("model")));
    assert_eq!(server.get("/v1/models/gpt-4").await.status, 200);
    server.close().await;
}
