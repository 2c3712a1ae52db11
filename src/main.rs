use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cob", version, about = "An AI agent on a small Qwen2.5 that lives in the same process")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Model files: list, pull, verify, info, rm, path
    Model(cob::cli::model::ModelArgs),
}

fn main() -> std::process::ExitCode {
    let Command::Model(args) = Cli::parse().command;
    std::process::ExitCode::from(cob::cli::model::run(args))
}
