//! What a child sees of our environment.

use std::ffi::OsString;
use std::process::Command;

use super::Environment;

/// Set for every child: nothing pages, prompts, or draws.
const QUIET: [(&str, &str); 9] = [
    ("PAGER", "cat"),
    ("GIT_PAGER", "cat"),
    ("MANPAGER", "cat"),
    ("SYSTEMD_PAGER", "cat"),
    ("GIT_TERMINAL_PROMPT", "0"),
    ("GIT_EDITOR", "true"),
    ("DEBIAN_FRONTEND", "noninteractive"),
    ("TERM", "dumb"),
    ("NO_COLOR", "1"),
];

/// Files that a shell would run before the command.
const STARTUP: [&str; 2] = ["BASH_ENV", "ENV"];

/// `inherited`: what the child would see without us, that is, our own variables.
pub(super) fn apply(
    command: &mut Command,
    policy: Environment,
    inherited: impl IntoIterator<Item = (OsString, OsString)>,
) {
    if policy == Environment::Scrubbed {
        for (name, value) in inherited {
            if is_secret(&name.to_string_lossy(), &value.to_string_lossy()) {
                command.env_remove(name);
            }
        }
        for name in STARTUP {
            command.env_remove(name);
        }
    }
    command.envs(QUIET);
}

/// Whether a variable is kept from commands that a model wrote: by its name (tokens, keys, passwords, credentials,
/// the cloud providers' own, agents' sockets) or because its value is a URL with a password in it.
pub fn is_secret(name: &str, value: &str) -> bool {
    /// Families of which too many members are secret to sort them.
    const PREFIXES: [&str; 9] =
        ["AWS_", "AZURE_", "OPENAI_", "ANTHROPIC_", "GEMINI_", "VAULT_", "TWILIO_", "STRIPE_", "SSH_AUTH_"];
    const PARTS: [&str; 10] =
        ["TOKEN", "SECRET", "KEY", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "PGPASS", "COOKIE", "WEBHOOK"];
    /// Whole words between underscores.
    const WORDS: [&str; 9] = ["AUTH", "AUTHORIZATION", "BEARER", "JWT", "PASS", "PAT", "PWD", "PW", "DSN"];
    const NAMES: [&str; 3] = ["GPG_AGENT_INFO", "SSH_AGENT_PID", "NETRC"];
    /// Words that hold one of the parts and are not what it says.
    const HARMLESS: [&str; 8] =
        ["TOKENIZER", "KEYBOARD", "KEYMAP", "KEYCODE", "KEYTIMEOUT", "MONKEY", "TURKEY", "HOTKEY"];

    let name = name.to_ascii_uppercase();
    if name == "PWD" || name == "OLDPWD" {
        return false;
    }
    if NAMES.contains(&name.as_str()) || PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
        return true;
    }
    let rest = HARMLESS.iter().fold(name, |name, word| name.replace(word, ""));
    PARTS.iter().any(|part| rest.contains(part))
        || rest.split('_').any(|word| WORDS.contains(&word))
        || url_with_password(value)
}

/// `scheme://user:password@host`
fn url_with_password(value: &str) -> bool {
    value.split("://").skip(1).any(|rest| {
        let authority = rest.split(['/', '?', '#', ' ']).next().unwrap_or_default();
        authority.rsplit_once('@').is_some_and(|(user, _)| user.contains(':'))
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::process::Command;

    use super::{Environment, apply, is_secret};

    #[test]
    fn a_child_sees_what_the_policy_leaves() {
        let inherited = [("MY_TOKEN", "hush"), ("BASH_ENV", "/x"), ("HARMLESS", "here"), ("TERM", "xterm")];
        for (policy, expected) in [(Environment::Scrubbed, "||here|dumb\n"), (Environment::Full, "hush|/x|here|dumb\n")]
        {
            let mut command = Command::new("sh");
            command.args(["-c", "echo \"$MY_TOKEN|$BASH_ENV|$HARMLESS|$TERM\""]).envs(inherited);
            let inherited = inherited.map(|(name, value)| (OsString::from(name), OsString::from(value)));
            apply(&mut command, policy, inherited);
            assert_eq!(String::from_utf8(command.output().unwrap().stdout).unwrap(), expected);
        }
    }

    #[test]
    fn secrets_are_told_from_the_rest() {
        for name in [
            "GITHUB_TOKEN",
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "OPENAI_API_KEY",
            "openai_api_key",
            "OPENAI_ORG",
            "ANTHROPIC_AUTH_TOKEN",
            "AWS_ACCESS_KEY_ID",
            "AWS_PROFILE",
            "DB_PASSWORD",
            "PGPASSWORD",
            "PGPASSFILE",
            "MYSQL_PWD",
            "CLIENT_SECRET",
            "SECRETS",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "SSH_AUTH_SOCK",
            "APIKEY",
            "MY_KEY",
            "KEYS",
            "NPM_CONFIG__AUTH",
            "DOCKER_AUTH_CONFIG",
            "GH_PAT",
            "SENTRY_DSN",
            "KEYBOARD_TOKEN",
            "HTTP_AUTHORIZATION",
            "MY_JWT",
            "SLACK_WEBHOOK_URL",
        ] {
            assert!(is_secret(name, ""), "{name}");
        }
        for name in [
            "PATH",
            "HOME",
            "PWD",
            "OLDPWD",
            "LANG",
            "USER",
            "SHELL",
            "EDITOR",
            "TERM",
            "KEYBOARD_LAYOUT",
            "KEYMAP",
            "TOKENIZERS_PARALLELISM",
            "CARGO_HOME",
            "RUSTFLAGS",
            "PYTHONPATH",
            "COMPASS",
            "AUTHOR",
            "PATTERN",
            "XAUTHORITY",
            "LC_ALL",
        ] {
            assert!(!is_secret(name, "/usr/bin:/bin"), "{name}");
        }
        assert!(is_secret("DATABASE_URL", "postgres://me:hush@db/x"));
        assert!(is_secret("HTTPS_PROXY", "http://me:hush@proxy:3128"));
        assert!(!is_secret("DATABASE_URL", "postgres://db:5432/x?at=a:b@c"));
        assert!(!is_secret("HTTPS_PROXY", "http://proxy:3128/"));
    }
}
