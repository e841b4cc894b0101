//! Settings that are more than a number or a name: checked where they are parsed, so that nobody has
//! to check them again. Each parses from a flag and from a field of the bindings alike.

use std::{fmt, str::FromStr, time::Duration};

use http::HeaderValue;
use serde::{Deserialize, Serialize};

/// A time in seconds: more than zero, at most a year, fractions allowed.
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
        if seconds > 0.0 && seconds <= 366.0 * 86400.0 {
            Ok(Self(Duration::from_secs_f64(seconds)))
        } else {
            Err(format!("{seconds} is not a time in seconds above 0 and up to a year"))
        }
    }
}

impl From<Seconds> for f64 {
    fn from(seconds: Seconds) -> Self {
        seconds.0.as_secs_f64()
    }
}

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse::<f64>().map_err(|_| format!("{text:?} is not a number"))?.try_into()
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.as_secs_f64())
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

impl TryFrom<String> for UrlPath {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<UrlPath> for String {
    fn from(path: UrlPath) -> Self {
        path.0
    }
}

/// A secret: shown by nothing that prints a `Config` for people.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ApiKey(String);

impl ApiKey {
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// The `Authorization` header of one who has the key.
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
        let visible = text.bytes().all(|byte| byte.is_ascii_graphic());
        if visible && !text.is_empty() {
            Ok(Self(text.to_owned()))
        } else {
            Err("a key is at least one visible ASCII character, without spaces".to_owned())
        }
    }
}

impl TryFrom<String> for ApiKey {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<ApiKey> for String {
    fn from(key: ApiKey) -> Self {
        key.0
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(***)")
    }
}
