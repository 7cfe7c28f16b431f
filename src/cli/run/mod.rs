//! `mainstem run`: answers a prompt, or chats at the terminal, with a model in this process or on a remote
//! server. Both receive requests of the HTTP API, so the results are those of a client of the server.
//!
//! Invariant: stdout carries the answer and nothing else; everything else goes to stderr.

pub mod args;

pub mod settings;

mod tool_calls;
pub mod transport;

pub mod remote;

pub mod client;
mod completer;

mod constraint;

pub mod exchange;

pub mod chat;

pub mod terminal;

pub use args::{OWN_DEFAULTS, RunArgs};

use super::{INTERRUPTED, escape, start, start_log};
use crate::actors::{Kind, ModelInfo};
use crate::server::{LocalApi, ServeParts};
use actix_web::rt::System;
use anyhow::{Result, bail, ensure};
use args::{AnswerSource, RunPlan, RunTask};
use chat::Chat;
use client::{Client, Dialog};
use exchange::{AnswerEnd, Screen, unless_stopped};
use std::io;
use std::process::ExitCode;
use terminal::{AnswerFormat, Interrupts, Output, Terminal};
use transport::Transport;

/// Answers the prompt or chats. The exit code is 130 if Ctrl-C interrupted an answer. Fails if there is no
/// answer or an incomplete one.
pub fn run(args: RunArgs) -> Result<ExitCode> {
    let plan = args.into_plan()?;
    if let AnswerSource::Local(config) = &plan.target {
        start_log(config)?;
    }
    System::new().block_on(execute(plan))
}

async fn execute(plan: RunPlan) -> Result<ExitCode> {
    let mut interrupts = Interrupts::listen()?;
    plan.note.into_iter().for_each(terminal::note);
    let (transport, model) = match unless_stopped(interrupts.next(), connect(plan.target)).await {
        Some(connected) => connected?,
        None => return Ok(ExitCode::from(INTERRUPTED)),
    };
    let RunPlan { task, system, dialect, delivery, form, settings, stats, .. } = plan;
    let output = Output::new(form, interrupts);
    let mut client = Client { transport, model: Some(model), dialect, delivery, settings };
    let mut dialog = Dialog { system, ..Dialog::default() };
    let done = match task {
        RunTask::Prompt(prompt) => {
            dialog.ask(prompt);
            one_answer(&mut client, &dialog, output, stats).await
        }
        RunTask::Chat { history } => chat(client, dialog, Terminal::new(output, history)?, stats).await,
    };
    match done {
        // The reader of stdout has closed it.
        Err(error) if is_broken_pipe(&error) => Ok(ExitCode::SUCCESS),
        done => done,
    }
}

/// Connects to the server or starts the engine. Returns the transport and the model's name.
async fn connect(target: AnswerSource) -> Result<(Box<dyn Transport>, String)> {
    match target {
        AnswerSource::Remote { server, model: Some(model) } => Ok((Box::new(server), model)),
        AnswerSource::Remote { server, model: None } => {
            let model = server.first_model().await?;
            Ok((Box::new(server), model))
        }
        AnswerSource::Local(config) => {
            let prepared = start::prepare(&config).await?;
            check_kind(&prepared.setup.model)?;
            let engine = prepared.start().await?;
            let name = engine.model.name.clone();
            Ok((Box::new(LocalApi::new(ServeParts::from(&engine), config.server)), name))
        }
    }
}

/// Fails for a model that generates no text, before it is loaded.
fn check_kind(model: &ModelInfo) -> Result<()> {
    let endpoints = model.endpoints.join(" and ");
    ensure!(
        model.generates(),
        "{} generates no text, as {}; use `mainstem serve`, which offers {endpoints}",
        model.name,
        match model.kind {
            Kind::Encoder => "an encoder-only model",
            Kind::Decoder | Kind::EncoderDecoder => "a model without a head",
        }
    );
    Ok(())
}

async fn one_answer(
    client: &mut Client,
    dialog: &Dialog,
    mut output: Output,
    stats: bool,
) -> Result<ExitCode> {
    let outcome = exchange::answer(client, dialog, &mut output, true).await?;
    output.end_line(&outcome.text)?;
    if output.format == AnswerFormat::Text {
        // As the API has them, for whoever runs the tools.
        outcome.calls.iter().try_for_each(|call| output.shown_line(&serde_json::json!(call).to_string()))?;
    }
    if let Some(stats) = outcome.stats.filter(|_| stats) {
        output.note(&stats);
    }
    match outcome.ending {
        AnswerEnd::Complete | AnswerEnd::Cut => Ok(ExitCode::SUCCESS),
        AnswerEnd::Interrupted => Ok(ExitCode::from(INTERRUPTED)),
        AnswerEnd::Failed(failure) => {
            if let (AnswerFormat::Json, Some(body)) = (output.format, &failure.body) {
                output.line(&body.to_string())?;
            }
            bail!(failure)
        }
    }
}

async fn chat(client: Client, dialog: Dialog, mut terminal: Terminal, stats: bool) -> Result<ExitCode> {
    let name = escape::visible(client.model.as_deref().unwrap_or_default()).into_owned();
    terminal.note(&format!("{name}: /help lists the commands, Ctrl-D ends the chat"));
    Chat { client, dialog, console: &mut terminal, stats, reasoning: false }.run().await?;
    Ok(ExitCode::SUCCESS)
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
