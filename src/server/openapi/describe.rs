//! Descriptions of operations, which modules of handlers write beside these.
//!
//! Invariant: a body is described by the type that it is written from, or by one of [`super::requests`].

use std::collections::BTreeMap;
use utoipa::openapi::path::{
    HttpMethod, Operation, OperationBuilder, Parameter, ParameterBuilder, ParameterIn,
};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::schema::{ArrayBuilder, Object, Schema, Type};
use utoipa::openapi::{Content, Paths, Ref, RefOr, Required, ResponseBuilder};
use utoipa::{PartialSchema, ToSchema};

/// The type of bodies in JSON.
pub const JSON: &str = "application/json";

const EVENTS: &str = "text/event-stream";

/// Operations that are described, and the schemas of their bodies.
#[derive(Default)]
pub struct Api {
    operations: Vec<DescribedOperation>,
    schemas: Vec<(String, RefOr<Schema>)>,
}

/// The description of an operation.
struct DescribedOperation {
    method: HttpMethod,
    path: &'static str,
    summary: &'static str,
    parameters: Vec<Parameter>,
    body: Option<(&'static str, RefOr<Schema>)>,
    /// Statuses, content types and schemas of its answers, apart from errors.
    answers: Vec<(&'static str, &'static str, Option<RefOr<Schema>>)>,
    /// Whether errors have the shape of another server's API.
    has_other_errors: bool,
}

/// An operation that is being described.
pub struct Described<'a> {
    operation: &'a mut DescribedOperation,
    schemas: &'a mut Vec<(String, RefOr<Schema>)>,
}

impl Api {
    /// Describes `GET` of a path, whose parts in braces are parameters.
    pub fn get(&mut self, path: &'static str, summary: &'static str) -> Described<'_> {
        self.add(HttpMethod::Get, path, summary)
    }

    /// Describes `POST` of a path, like [`Api::get`].
    pub fn post(&mut self, path: &'static str, summary: &'static str) -> Described<'_> {
        self.add(HttpMethod::Post, path, summary)
    }

    /// Describes `DELETE` of a path, like [`Api::get`].
    pub fn delete(&mut self, path: &'static str, summary: &'static str) -> Described<'_> {
        self.add(HttpMethod::Delete, path, summary)
    }

    /// Returns the paths, with errors of the type `E`, and the schemas of all bodies.
    pub fn finish<E: ToSchema>(mut self) -> (Paths, Vec<(String, RefOr<Schema>)>) {
        let error = reference::<E>(&mut self.schemas);
        let mut paths = Paths::new();
        for operation in self.operations {
            let (path, method) = (operation.path, operation.method.clone());
            paths.add_path_operation(path, vec![method], operation.build(&error));
        }
        (paths, self.schemas)
    }

    fn add(&mut self, method: HttpMethod, path: &'static str, summary: &'static str) -> Described<'_> {
        let names = path.split('{').skip(1).filter_map(|rest| rest.split('}').next());
        let parameters = names.map(|name| parameter(name, ParameterIn::Path, Type::String, None)).collect();
        let (body, answers) = (None, Vec::new());
        let has_other_errors = false;
        let operation =
            DescribedOperation { method, path, summary, parameters, body, answers, has_other_errors };
        self.operations.push(operation);
        let operation = self.operations.last_mut().expect("it was pushed; anything else is a bug");
        Described { operation, schemas: &mut self.schemas }
    }
}

impl Described<'_> {
    /// Adds a request body in JSON.
    pub fn body<T: ToSchema>(self) -> Self {
        self.body_as::<T>(JSON)
    }

    /// Adds a request body of another type.
    pub fn body_as<T: ToSchema>(mut self, content_type: &'static str) -> Self {
        self.operation.body = Some((content_type, self.reference::<T>()));
        self
    }

    /// Adds a request body that is an object in JSON, in the shape of another server's API.
    pub fn body_object(self) -> Self {
        self.operation.body = Some((JSON, Object::new().into()));
        self
    }

    /// Adds a parameter of the query.
    pub fn query(self, name: &str, kind: Type, description: &str) -> Self {
        self.operation.parameters.push(parameter(name, ParameterIn::Query, kind, Some(description)));
        self
    }

    /// Adds an answer in JSON with status 200.
    pub fn returns<T: ToSchema>(self) -> Self {
        self.returns_with::<T>("200")
    }

    /// Adds an answer in JSON with a status.
    pub fn returns_with<T: ToSchema>(mut self, status: &'static str) -> Self {
        let schema = self.reference::<T>();
        self.operation.answers.push((status, JSON, Some(schema)));
        self
    }

    /// Adds an answer in JSON of a generic type, which is called `name` with the argument `A`.
    pub fn returns_generic<T: ToSchema, A: ToSchema>(mut self, name: &str) -> Self {
        self.reference::<A>();
        let schema = reference_as::<T>(name, self.schemas);
        self.operation.answers.push(("200", JSON, Some(schema)));
        self
    }

    /// Says that errors are objects in the shape of another server's API.
    pub fn fails_otherwise(self) -> Self {
        self.operation.has_other_errors = true;
        self
    }

    /// Adds an answer that is any object in JSON.
    pub fn returns_object(self) -> Self {
        self.operation.answers.push(("200", JSON, Some(Object::new().into())));
        self
    }

    /// Adds an answer that is any array of objects in JSON.
    pub fn returns_objects(self) -> Self {
        let array = ArrayBuilder::new().items(Object::new()).build();
        self.operation.answers.push(("200", JSON, Some(array.into())));
        self
    }

    /// Adds an answer of another type: a text, or server-sent events.
    ///
    /// Events have no schema: OpenAPI 3.1 leaves open whether it would describe the stream, an event or an
    /// event's data, and its readers differ.
    pub fn returns_as(self, content_type: &'static str) -> Self {
        let text = || Object::builder().schema_type(Type::String).build().into();
        let schema = (content_type != EVENTS).then(text);
        self.operation.answers.push(("200", content_type, schema));
        self
    }

    /// Adds an answer as server-sent events.
    pub fn streams(self) -> Self {
        self.returns_as(EVENTS)
    }

    /// Returns a reference to a schema, which the document then has.
    fn reference<T: ToSchema>(&mut self) -> RefOr<Schema> {
        reference::<T>(self.schemas)
    }
}

fn reference<T: ToSchema>(schemas: &mut Vec<(String, RefOr<Schema>)>) -> RefOr<Schema> {
    reference_as::<T>(&T::name(), schemas)
}

fn reference_as<T: ToSchema>(name: &str, schemas: &mut Vec<(String, RefOr<Schema>)>) -> RefOr<Schema> {
    T::schemas(schemas);
    schemas.push((name.to_owned(), <T as PartialSchema>::schema()));
    Ref::from_schema_name(name).into()
}

fn parameter(name: &str, place: ParameterIn, kind: Type, description: Option<&str>) -> Parameter {
    let is_path = matches!(place, ParameterIn::Path);
    ParameterBuilder::new()
        .name(name)
        .parameter_in(place)
        .required(if is_path { Required::True } else { Required::False })
        .description(description)
        .schema(Some(Object::builder().schema_type(kind).build()))
        .build()
}

impl DescribedOperation {
    /// Returns the operation, whose errors have the schema `error`.
    fn build(self, error: &RefOr<Schema>) -> Operation {
        let words = self.path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        let method = method_name(&self.method);
        let id = std::iter::once(method).chain(words).collect::<Vec<_>>().join("_");
        let mut operation = OperationBuilder::new()
            .summary(Some(self.summary))
            .operation_id(Some(id))
            .parameters(Some(self.parameters));
        if let Some((content_type, schema)) = self.body {
            let body = RequestBodyBuilder::new().required(Some(Required::True));
            operation =
                operation.request_body(Some(body.content(content_type, Content::new(Some(schema))).build()));
        }
        let mut answers = BTreeMap::<&str, ResponseBuilder>::new();
        for (status, content_type, schema) in self.answers {
            let answer =
                answers.remove(status).unwrap_or_else(|| ResponseBuilder::new().description("The answer."));
            answers.insert(status, answer.content(content_type, Content::new(schema)));
        }
        let error = if self.has_other_errors { Object::new().into() } else { error.clone() };
        for (statuses, description) in [("4XX", "The request is refused."), ("5XX", "The server has failed.")]
        {
            let answer = ResponseBuilder::new().description(description);
            answers.insert(statuses, answer.content(JSON, Content::new(Some(error.clone()))));
        }
        answers
            .into_iter()
            .fold(operation, |operation, (status, answer)| operation.response(status, answer.build()))
            .build()
    }
}

fn method_name(method: &HttpMethod) -> &'static str {
    match method {
        HttpMethod::Get => "get",
        HttpMethod::Post => "post",
        HttpMethod::Delete => "delete",
        _ => unreachable!("no other method is described; anything else is a bug"),
    }
}
