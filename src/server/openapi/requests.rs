//! Schemas of request bodies. Requests are parsed field by field, with messages that a schema cannot give, so
//! these types only describe them.
//!
//! Invariant: every field is one that the server knows; it accepts further ones (docs/api.md).

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Body of `POST /v1/completions`.
#[derive(Serialize, ToSchema)]
pub struct CompletionRequest {
    /// A text, a list of texts, a list of token ids, or a list of such lists.
    prompt: PromptField,
    /// Text after the generated one, for models that can fill in the middle.
    suffix: Option<String>,
    /// Whether the output starts with the prompt.
    echo: Option<bool>,
    /// Number of most likely tokens to list for each token.
    #[schema(minimum = 0, maximum = 20)]
    logprobs: Option<u32>,
    /// Whether the tokenizer adds its special tokens around texts.
    add_special_tokens: Option<bool>,
    #[serde(flatten)]
    generation: GenerationFields,
}

/// Body of `POST /v1/chat/completions`.
#[derive(Serialize, ToSchema)]
pub struct ChatRequest {
    messages: Vec<MessageField>,
    /// Functions that the model may call.
    tools: Option<Vec<ToolField>>,
    /// `none`, `auto`, `required`, or an object that names a function.
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    /// Whether to return log-probabilities of the generated tokens.
    logprobs: Option<bool>,
    /// Number of most likely tokens to list for each token; requires `logprobs`.
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<u32>,
    /// Whether the response has the model's reasoning.
    include_reasoning: Option<bool>,
    reasoning_effort: Option<String>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    /// Variables for the chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Maximum number of generated tokens, like `max_tokens`.
    #[schema(minimum = -1)]
    max_completion_tokens: Option<i64>,
    #[serde(flatten)]
    generation: GenerationFields,
}

/// Fields of both generation APIs.
#[derive(Serialize, ToSchema)]
struct GenerationFields {
    /// Name of the served model, which is the default.
    model: Option<String>,
    /// Maximum number of generated tokens; -1 is the rest of the context.
    #[schema(minimum = -1)]
    max_tokens: Option<i64>,
    /// Minimum number of generated tokens.
    #[schema(minimum = 0)]
    min_tokens: Option<i64>,
    /// Number of choices per prompt.
    #[schema(minimum = 1, maximum = 128)]
    n: Option<u32>,
    /// Number of choices of which the best `n` are returned.
    #[schema(minimum = 1, maximum = 128)]
    best_of: Option<u32>,
    /// 0 is greedy.
    #[schema(minimum = 0)]
    temperature: Option<f64>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    top_p: Option<f64>,
    /// 0 and -1 keep all tokens.
    #[schema(minimum = -1)]
    top_k: Option<i64>,
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f64>,
    repetition_penalty: Option<f64>,
    #[schema(minimum = -2, maximum = 2)]
    presence_penalty: Option<f64>,
    #[schema(minimum = -2, maximum = 2)]
    frequency_penalty: Option<f64>,
    /// Seed of the random numbers: equal ones give equal tokens.
    seed: Option<i64>,
    /// A string, a token id, or a list of up to 64 of both.
    stop: Option<StopField>,
    stop_token_ids: Option<Vec<u32>>,
    include_stop_str_in_output: Option<bool>,
    /// Whether generation continues past the model's own end tokens.
    ignore_eos: Option<bool>,
    skip_special_tokens: Option<bool>,
    /// From token ids or texts to numbers from -100 to 100.
    #[schema(value_type = Option<Object>)]
    logit_bias: Option<Map<String, Value>>,
    /// Whether the answer comes as server-sent events.
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    #[schema(minimum = 0, maximum = 20)]
    prompt_logprobs: Option<u32>,
    return_token_ids: Option<bool>,
    use_beam_search: Option<bool>,
    #[schema(minimum = 1)]
    beam_width: Option<u32>,
    length_penalty: Option<f64>,
    /// The form of the answer.
    response_format: Option<ResponseFormatField>,
    /// The form of the answer, as in vLLM.
    #[schema(value_type = Option<Object>)]
    structured_outputs: Option<Map<String, Value>>,
    /// Text that separates the request in the prefix cache.
    #[schema(min_length = 1, max_length = 1024)]
    cache_salt: Option<String>,
    /// Place among the waiting requests of the same class; lower ones go first.
    priority: Option<i32>,
    service_tier: Option<String>,
    user: Option<String>,
}

/// One or several prompts.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only described")]
enum PromptField {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    Lists(Vec<Vec<u32>>),
}

/// One or several stop conditions.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only described")]
enum StopField {
    Text(String),
    Id(u32),
    Texts(Vec<String>),
    Ids(Vec<u32>),
}

/// Options of a stream.
#[derive(Serialize, ToSchema)]
struct StreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
}

/// The form of the answer.
#[derive(Serialize, ToSchema)]
struct ResponseFormatField {
    /// `text`, `json_object` or `json_schema`.
    #[serde(rename = "type")]
    kind: String,
    /// The schema, with a name.
    #[schema(value_type = Option<Object>)]
    json_schema: Option<Map<String, Value>>,
}

/// A message of a conversation.
#[derive(Serialize, ToSchema)]
struct MessageField {
    #[schema(min_length = 1)]
    role: String,
    /// A text, or a list of parts of type `text`.
    content: Option<ContentField>,
    name: Option<String>,
    reasoning_content: Option<String>,
    tool_call_id: Option<String>,
    #[schema(value_type = Option<Vec<Object>>)]
    tool_calls: Option<Vec<Value>>,
}

/// The content of a message.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only described")]
enum ContentField {
    Text(String),
    Parts(Vec<TextPart>),
}

/// A part of the content of a message.
#[derive(Serialize, ToSchema)]
struct TextPart {
    /// Always `text`.
    #[serde(rename = "type")]
    kind: String,
    text: String,
}

/// A function that the model may call.
#[derive(Serialize, ToSchema)]
struct ToolField {
    /// Always `function`.
    #[serde(rename = "type")]
    kind: String,
    function: FunctionField,
}

/// The name and the parameters of a function.
#[derive(Serialize, ToSchema)]
struct FunctionField {
    name: String,
    description: Option<String>,
    /// A JSON schema.
    #[schema(value_type = Option<Object>)]
    parameters: Option<Map<String, Value>>,
    strict: Option<bool>,
}

/// Body of `POST /v1/embeddings`.
#[derive(Serialize, ToSchema)]
pub struct EmbeddingsBody {
    input: PromptField,
    model: Option<String>,
    /// `float` or `base64`.
    encoding_format: Option<String>,
    /// Number of leading dimensions to return.
    #[schema(minimum = 1)]
    dimensions: Option<u32>,
    /// `mean`, `cls` or `last`.
    pooling: Option<String>,
    normalize: Option<bool>,
    /// Name of one of the model's prompts, which goes before each text.
    prompt_name: Option<String>,
    /// A prompt, which goes before each text.
    prompt: Option<String>,
    /// The use of the texts, such as `query` or `document`, for which the model may have a prompt.
    input_type: Option<String>,
    add_special_tokens: Option<bool>,
    user: Option<String>,
}

/// A text, or an object with one.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only described")]
enum DocumentField {
    Text(String),
    Object { text: String },
}

/// One text or several.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only described")]
enum DocumentsField {
    One(DocumentField),
    Several(Vec<DocumentField>),
}

/// Fields of the APIs that compare and classify texts.
#[derive(Serialize, ToSchema)]
struct ScoringFields {
    model: Option<String>,
    /// Maximum number of tokens of an input, which is truncated; -1 is the model's.
    #[schema(minimum = -1)]
    truncate_prompt_tokens: Option<i64>,
    /// Whether longer inputs are truncated to the model's maximum.
    truncate: Option<bool>,
    /// Whether logits become scores; otherwise they are returned as they are.
    use_activation: Option<bool>,
}

/// Body of `POST /v1/rerank`.
#[derive(Serialize, ToSchema)]
pub struct RerankBody {
    query: DocumentField,
    documents: Vec<DocumentField>,
    /// Number of documents to return; 0 is all.
    #[schema(minimum = 0)]
    top_n: Option<u32>,
    return_documents: Option<bool>,
    /// Number of tokens to which documents are truncated.
    #[schema(minimum = 1)]
    max_tokens_per_doc: Option<u32>,
    #[serde(flatten)]
    scoring: ScoringFields,
}

/// Body of `POST /v1/score`: the texts of the pairs, under a pair of names: `text_1` and `text_2`,
/// `queries` and `items` or `documents`, `data_1` and `data_2`.
#[derive(Serialize, ToSchema)]
pub struct ScoreBody {
    text_1: Option<DocumentsField>,
    text_2: Option<DocumentsField>,
    queries: Option<DocumentsField>,
    items: Option<DocumentsField>,
    documents: Option<DocumentsField>,
    data_1: Option<DocumentsField>,
    data_2: Option<DocumentsField>,
    #[serde(flatten)]
    scoring: ScoringFields,
}

/// Body of `POST /v1/classify`.
#[derive(Serialize, ToSchema)]
pub struct ClassifyBody {
    input: PromptField,
    /// Labels of tokens that are not returned: `O` by default.
    ignore_labels: Option<Vec<String>>,
    #[serde(flatten)]
    scoring: ScoringFields,
}

/// Body of `POST /v1/fill-mask`.
#[derive(Serialize, ToSchema)]
pub struct FillMaskBody {
    input: PromptField,
    model: Option<String>,
    /// Number of candidates for each mask.
    #[schema(minimum = 1, maximum = 20)]
    top_k: Option<u32>,
    add_special_tokens: Option<bool>,
}

/// Body of `POST /v1/tokenize`: a prompt, or messages.
#[derive(Serialize, ToSchema)]
pub struct TokenizeBody {
    prompt: Option<String>,
    messages: Option<Vec<MessageField>>,
    model: Option<String>,
    add_special_tokens: Option<bool>,
    add_generation_prompt: Option<bool>,
    return_token_strs: Option<bool>,
}

/// Body of `POST /v1/detokenize`.
#[derive(Serialize, ToSchema)]
pub struct DetokenizeBody {
    tokens: Vec<u32>,
    model: Option<String>,
}

/// Body of `POST /v1/files`: a form.
#[derive(Serialize, ToSchema)]
pub struct UploadBody {
    /// Lines of requests in JSON.
    #[schema(value_type = String, content_media_type = "application/octet-stream")]
    file: Vec<u8>,
    /// Always `batch`.
    purpose: String,
}

/// Body of `POST /v1/batches`.
#[derive(Serialize, ToSchema)]
pub struct BatchBody {
    input_file_id: String,
    /// The path that the requests of the file are for.
    endpoint: String,
    /// A time, such as `24h`.
    completion_window: String,
    #[schema(value_type = Option<Object>)]
    metadata: Option<Map<String, Value>>,
}
