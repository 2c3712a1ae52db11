fn main() -> std::process::ExitCode {
    cob::cli::main()
}
