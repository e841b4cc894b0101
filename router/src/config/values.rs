//! Setting types with checks. A value is checked once, when it is parsed from a flag or from a field of the bindings.

use std::{ffi::OsStr, fmt, str::FromStr, time::Duration};

use clap::{
    Arg, Command,
    builder::{TypedValueParser, ValueParserFactory},
    error::ErrorKind,
};
use http::{HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};

/// A network as `ADDRESS/BITS`.
pub type Network = ipnet::IpNet;

/// Implements parsing and conversion of a checked number, for flags and JSON.
macro_rules! number {
    ($name:ident, $plain:expr) => {
        impl From<$name> for f64 {
            fn from(value: $name) -> Self {
                $plain(value)
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                text.parse::<f64>().map_err(|_| format!("{text:?} is not a number"))?.try_into()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", f64::from(*self))
            }
        }
    };
}

/// Implements the conversions of a checked text, for JSON.
macro_rules! text {
    ($name:ident, $plain:expr) => {
        impl TryFrom<String> for $name {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                $plain(value)
            }
        }
    };
}

number!(Seconds, |seconds: Seconds| seconds.0.as_secs_f64());
number!(Share, |share: Share| share.0);
number!(Ratio, |ratio: Ratio| ratio.0);
text!(UrlPath, |path: UrlPath| path.0);
text!(HeaderField, |field: HeaderField| field.0.to_string());
text!(ApiKey, |key: ApiKey| key.0);

const LONGEST: Duration = Duration::from_secs(366 * 86400);

/// A time in seconds: more than zero, at most a year. Fractions are allowed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Seconds(Duration);

impl Seconds {
    pub fn get(self) -> Duration {
        self.0
    }
}

impl TryFrom<f64> for Seconds {
    type Error = String;

    fn try_from(seconds: f64) -> Result<Self, String> {
        match Duration::try_from_secs_f64(seconds) {
            Ok(time) if !time.is_zero() && time <= LONGEST => Ok(Self(time)),
            _ => Err(format!("{seconds} is not a time in seconds above 0 and up to a year")),
        }
    }
}

/// A share of a whole, from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Share(f64);

impl Share {
    pub fn get(self) -> f64 {
        self.0
    }
}

impl TryFrom<f64> for Share {
    type Error = String;

    fn try_from(share: f64) -> Result<Self, String> {
        if (0.0..=1.0).contains(&share) {
            Ok(Self(share))
        } else {
            Err(format!("{share} is not a share between 0 and 1"))
        }
    }
}

/// A ratio of 1 or more.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Ratio(f64);

impl Ratio {
    pub fn get(self) -> f64 {
        self.0
    }
}

impl TryFrom<f64> for Ratio {
    type Error = String;

    fn try_from(ratio: f64) -> Result<Self, String> {
        if ratio.is_finite() && ratio >= 1.0 {
            Ok(Self(ratio))
        } else {
            Err(format!("{ratio} is not a ratio of 1 or more"))
        }
    }
}

/// A limit above 0, or -1 for no limit, as in SGLang.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "i64")]
pub struct AtMost(Option<usize>);

impl AtMost {
    pub fn get(self) -> Option<usize> {
        self.0
    }
}

impl TryFrom<i64> for AtMost {
    type Error = String;

    fn try_from(count: i64) -> Result<Self, String> {
        match usize::try_from(count) {
            Ok(count) if count > 0 => Ok(Self(Some(count))),
            _ if count == -1 => Ok(Self(None)),
            _ => Err(format!("{count} is neither a number above 0 nor -1 (no limit)")),
        }
    }
}

impl From<AtMost> for i64 {
    fn from(value: AtMost) -> Self {
        value.0.map_or(-1, |count| Self::try_from(count).unwrap_or(Self::MAX))
    }
}

impl FromStr for AtMost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse::<i64>().map_err(|_| format!("{text:?} is not a whole number"))?.try_into()
    }
}

/// The name of a header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HeaderField(HeaderName);

impl HeaderField {
    pub fn name(&self) -> &HeaderName {
        &self.0
    }
}

impl FromStr for HeaderField {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let name = text.parse().map_err(|_| format!("{text:?} is not the name of a header"))?;
        Ok(Self(name))
    }
}

/// A path such as `/health`, without query.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct UrlPath(String);

impl UrlPath {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for UrlPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<http::uri::PathAndQuery>() {
            Ok(path) if text.starts_with('/') && path.query().is_none() => {
                Ok(Self(text.to_owned()))
            }
            _ => Err(format!("{text:?} is not a path such as /health")),
        }
    }
}

/// A secret. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ApiKey(String);

impl ApiKey {
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// The `Authorization` field with this key.
    pub fn bearer(&self) -> HeaderValue {
        let value = HeaderValue::try_from(format!("Bearer {}", self.0));
        let mut value = value.expect("contract: a key is visible ASCII");
        value.set_sensitive(true);
        value
    }
}

impl FromStr for ApiKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            // The flag may not be on the command line at all.
            Err("a key is not empty: leave it out, or unset its environment variable".to_owned())
        } else if text.trim().len() < text.len() {
            // The newline of its file, as a rule.
            Err("the key begins or ends with a blank or a newline; remove it".to_owned())
        } else if text.bytes().all(|byte| byte.is_ascii_graphic()) {
            Ok(Self(text.to_owned()))
        } else {
            Err("a key has visible ASCII characters only, without spaces".to_owned())
        }
    }
}

impl ValueParserFactory for ApiKey {
    type Parser = KeyParser;

    fn value_parser() -> KeyParser {
        KeyParser
    }
}

/// Parses keys of flags and variables. Its errors do not show the value, as those of clap do.
#[derive(Clone)]
pub struct KeyParser;

impl TypedValueParser for KeyParser {
    type Value = ApiKey;

    fn parse_ref(
        &self,
        command: &Command,
        flag: Option<&Arg>,
        value: &OsStr,
    ) -> Result<ApiKey, clap::Error> {
        value.to_string_lossy().parse().map_err(|why: String| {
            let name = flag.map_or_else(|| "a key".to_owned(), ToString::to_string);
            let variable = flag.and_then(Arg::get_env);
            let or = variable.map_or_else(String::new, |name| format!(" or {}", name.display()));
            let message = format!("invalid value for '{name}'{or}: {why}\n");
            clap::Error::raw(ErrorKind::ValueValidation, message).with_cmd(command)
        })
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(***)")
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::config::Config;

    #[test]
    fn a_time_is_above_zero_and_up_to_a_year() {
        for good in [1e-9, 0.02, 1800.0, 31_536_000.0] {
            let seconds = Seconds::try_from(good).expect("a time");
            assert!(!seconds.get().is_zero(), "{good}");
        }
        for bad in [0.0, -1.0, 1e-10, 32_000_000.0, f64::INFINITY, f64::NAN] {
            assert!(Seconds::try_from(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_error_of_a_key_does_not_show_it() {
        for (key, why) in [
            ("sesame\n", "ends with a blank or a newline; remove it"),
            ("ses ame", "visible ASCII"),
            ("s\u{e9}same", "visible ASCII"),
            ("", "not empty"),
        ] {
            for flag in ["--api-key", "--admin-api-key", "--worker-api-key", "--replay-key"] {
                let error = Config::try_parse_from(["mla-router", flag, key]).expect_err("invalid");
                let text = error.to_string();
                let variable =
                    format!(" or MLA_ROUTER{}", flag[1..].to_uppercase().replace('-', "_"));
                for part in [flag, &variable, why] {
                    assert!(text.contains(part), "{text}");
                }
                assert!(key.is_empty() || !text.contains(&key[key.len() - 4..]), "{text}");
                assert_eq!(error.exit_code(), 2);
            }
        }
    }
}
