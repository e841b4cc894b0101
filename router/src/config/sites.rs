//! Allowed origins of web pages, and allowed host names.

use std::{fmt, str::FromStr};

use http::Uri;
use serde::{Deserialize, Serialize};

/// An origin of web pages: `SCHEME://HOST[:PORT]`, or `*` for all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AllowedOrigin(String);

/// A host name, or `*` for all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AllowedHost(String);

impl AllowedOrigin {
    pub fn is_any(&self) -> bool {
        self.0 == "*"
    }

    /// Whether it equals an `Origin` header. `*` equals none.
    pub fn is(&self, origin: &[u8]) -> bool {
        self.0.as_bytes().eq_ignore_ascii_case(origin)
    }
}

impl AllowedHost {
    pub fn is_any(&self) -> bool {
        self.0 == "*"
    }

    pub fn is(&self, name: &str) -> bool {
        self.0.eq_ignore_ascii_case(name)
    }
}

impl FromStr for AllowedOrigin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_origin = || {
            let parts = text.parse::<Uri>().ok()?.into_parts();
            let has_path = parts.path_and_query.is_some_and(|path| path != "/");
            Some(parts.scheme.is_some() && !has_path && !text.ends_with('/'))
        };
        if text == "*" || is_origin() == Some(true) {
            Ok(Self(text.to_owned()))
        } else {
            Err(format!("{text:?} is neither an origin such as https://chat.example.com nor *"))
        }
    }
}

impl FromStr for AllowedHost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        if text == "*" || !text.is_empty() && text.bytes().all(is_name) {
            Ok(Self(text.to_owned()))
        } else {
            Err(format!(
                "{text:?} is neither a name such as chat.example.com, without a port, nor *"
            ))
        }
    }
}

macro_rules! text {
    ($name:ident) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl TryFrom<String> for $name {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.0
            }
        }
    };
}

text!(AllowedOrigin);
text!(AllowedHost);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_has_the_form_of_browsers() {
        for good in ["*", "https://a.example", "http://localhost:3000", "app://x"] {
            assert!(good.parse::<AllowedOrigin>().is_ok(), "{good}");
        }
        for bad in ["", "a.example", "https://a.example/", "https://a.example/x", "https://"] {
            assert!(bad.parse::<AllowedOrigin>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_host_has_no_port() {
        for good in ["*", "chat.example.com", "my_host"] {
            assert!(good.parse::<AllowedHost>().is_ok(), "{good}");
        }
        for bad in ["", "a:80", "http://a", "a/b", "*.a"] {
            assert!(bad.parse::<AllowedHost>().is_err(), "{bad}");
        }
    }
}
