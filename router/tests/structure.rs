//! Dependencies of the library point one way: between its modules, and between the files of a module.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// The top-level modules, bottom first. A module uses only modules of lower layers.
const LAYERS: [&[&str]; 15] = [
    &["cores", "deadline_timer", "file", "file_watch", "heap", "log_lines", "sync", "wire"],
    &["error", "shutdown"],
    &["names"],
    &["key"],
    &["config", "endpoint", "tree"],
    &["correct", "metrics", "upstream"],
    &["admission", "engine", "history", "policy"],
    &["fleet"],
    &["telemetry"],
    &["router"],
    &["discovery", "proxy", "stats"],
    &["admin", "body"],
    &["server"],
    &["handle"],
    &["cli"],
];

const TESTS: &str = "#[cfg(test)]\nmod tests {\n";

/// The path of a module below the crate root, such as `["proxy", "job"]`.
type Module = Vec<String>;

fn layer_of(module: &str) -> Option<usize> {
    LAYERS.iter().position(|modules| modules.contains(&module))
}

/// A file of the library.
struct Source {
    path: PathBuf,
    module: Module,
    /// Whether the file is a `mod.rs`, which may use its children and re-export their names.
    is_facade: bool,
    /// The text without comments and tests.
    code: String,
}

impl Source {
    /// Reads all files except the crate roots.
    fn all() -> Vec<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let (mut folders, mut sources) = (vec![root.clone()], Vec::new());
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).expect("a folder of sources") {
                let path = entry.expect("an entry of it").path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let module = path.strip_prefix(&root).expect("it lies there").with_extension("");
                let mut module: Module =
                    module.iter().map(|name| name.to_string_lossy().into_owned()).collect();
                let is_facade = module.pop_if(|name| name == "mod").is_some();
                let is_root = module == ["lib"] || module == ["main"];
                if path.extension().is_some_and(|extension| extension == "rs") && !is_root {
                    let code = code_of(&path);
                    sources.push(Self { path, module, is_facade, code });
                }
            }
        }
        sources
    }

    fn top(&self) -> &str {
        &self.module[0]
    }

    /// The absolute paths of the crate that the code names.
    fn uses(&self) -> Vec<Module> {
        used(&self.code, &self.module)
    }
}

/// Reads a file without its comments and tests. Tests may use any module; they must come last.
fn code_of(path: &Path) -> String {
    let text = fs::read_to_string(path).expect("a source");
    let (code, tests) = text.split_once(TESTS).unwrap_or((&text, "\n}\n"));
    let behind = tests.split_once("\n}\n").map(|(_, behind)| behind);
    assert_eq!(behind, Some(""), "{}: the tests come last", path.display());
    let uncommented = code.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code));
    uncommented.collect::<Vec<_>>().join("\n")
}

/// The absolute paths named by `crate::` and `super::` in the code of `module`.
fn used(code: &str, module: &[String]) -> Vec<Module> {
    let mut found = Vec::new();
    let mut rest = code;
    while let Some(at) = ["crate::", "super::"].iter().filter_map(|root| rest.find(root)).min() {
        let is_crate = rest[at..].starts_with("crate::");
        rest = &rest[at + "crate::".len()..];
        let mut depth = if is_crate { 0 } else { module.len() - 1 };
        while !is_crate && let Some(further) = rest.strip_prefix("super::") {
            (rest, depth) = (further, depth - 1);
        }
        let absolute = |path: Module| [&module[..depth], &path[..]].concat();
        found.extend(paths(rest).into_iter().map(absolute));
    }
    found
}

/// The paths at the start of `text`: one path, or all paths of a list in braces.
fn paths(text: &str) -> Vec<Module> {
    let text = text.trim_start();
    if let Some(list) = text.strip_prefix('{') {
        return items(list).into_iter().flat_map(paths).collect();
    }
    let is_name = |character: char| character.is_alphanumeric() || character == '_';
    let name = text.split(|character| !is_name(character)).next().unwrap_or_default();
    if name.is_empty() {
        return Vec::new();
    }
    let below = text[name.len()..].strip_prefix("::").map(paths).unwrap_or_default();
    if below.is_empty() {
        return vec![vec![name.to_owned()]];
    }
    below.into_iter().map(|path| [vec![name.to_owned()], path].concat()).collect()
}

/// The items of a list whose opening brace was read.
fn items(list: &str) -> Vec<&str> {
    let (mut items, mut start, mut depth) = (Vec::new(), 0, 1);
    for (at, character) in list.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 || depth == 1 && character == ',' {
            items.push(&list[start..at]);
            start = at + 1;
        }
        if depth == 0 {
            break;
        }
    }
    items
}

/// The file of each module, and of each name that a `mod.rs` re-exports.
struct Files<'a> {
    modules: BTreeMap<&'a [String], &'a Source>,
    exports: BTreeMap<Module, Module>,
}

impl<'a> Files<'a> {
    fn new(sources: &'a [Source]) -> Self {
        let modules: BTreeMap<&[String], &Source> =
            sources.iter().map(|source| (&source.module[..], source)).collect();
        let mut exports = BTreeMap::new();
        for facade in sources.iter().filter(|source| source.is_facade) {
            for statement in facade.code.split("use ").skip(1) {
                for path in paths(statement).into_iter().filter(|path| path.len() > 1) {
                    let child = [&facade.module[..], &path[..1]].concat();
                    let name = [&facade.module[..], &path[path.len() - 1..]].concat();
                    if modules.contains_key(&child[..]) {
                        exports.insert(name, child);
                    }
                }
            }
        }
        Self { modules, exports }
    }

    /// The file that declares `path`.
    fn of(&self, path: &[String]) -> Option<&'a Source> {
        (1..=path.len()).rev().find_map(|length| {
            let part = &path[..length];
            let exported = self.exports.get(part).and_then(|file| self.modules.get(&file[..]));
            self.modules.get(part).or(exported).copied()
        })
    }

    /// The files of the same module that `source` uses. Its `mod.rs` does not count.
    fn uses(&self, source: &Source) -> BTreeSet<&'a [String]> {
        let files = source.uses().into_iter().filter_map(|path| self.of(&path));
        files
            .filter(|file| !file.is_facade && file.top() == source.top())
            .map(|file| &file.module[..])
            .filter(|module| *module != source.module)
            .collect()
    }
}

#[test]
fn every_module_has_one_layer() {
    let mut layers: Vec<_> = LAYERS.concat();
    layers.sort_unstable();
    let sources = Source::all();
    let modules: BTreeSet<_> = sources.iter().map(Source::top).collect();
    assert_eq!(layers, modules.into_iter().collect::<Vec<_>>());
}

#[test]
fn modules_use_only_lower_layers() {
    let sources = Source::all();
    let wrong: BTreeSet<_> = sources
        .iter()
        .flat_map(|source| source.uses().into_iter().map(move |used| (source, used[0].clone())))
        .filter(|(source, used)| source.top() != used)
        // A name that is no module is a re-export of the crate root, for other crates only.
        .filter(|(source, used)| {
            layer_of(used).is_none_or(|used| Some(used) >= layer_of(source.top()))
        })
        .map(|(source, used)| format!("{} uses {used}", source.path.display()))
        .collect();
    assert!(wrong.is_empty(), "not from a lower layer: {wrong:#?}");
}

#[test]
fn the_files_of_a_module_do_not_use_each_other_in_a_circle() {
    let sources = Source::all();
    let files = Files::new(&sources);
    let mut open: BTreeMap<&[String], BTreeSet<&[String]>> = sources
        .iter()
        .filter(|source| !source.is_facade)
        .map(|source| (&source.module[..], files.uses(source)))
        .collect();
    assert!(open.values().filter(|uses| !uses.is_empty()).count() > 50, "the paths are found");
    // Files without open uses are removed again and again. The rest is in circles, or uses one.
    loop {
        let free = open.iter().filter(|(_, uses)| uses.is_empty()).map(|(file, _)| *file);
        let free: BTreeSet<_> = free.collect();
        if free.is_empty() {
            break;
        }
        open.retain(|file, _| !free.contains(file));
        for uses in open.values_mut() {
            uses.retain(|used| !free.contains(used));
        }
    }
    assert!(open.is_empty(), "in a circle: {open:#?}");
}

#[test]
fn paths_are_found_in_every_form() {
    let code = "
        use crate::{
            body::{self, worker::WorkerFrames},
            error::Error,
            key,
        };
        pub(crate) use crate::metrics::labels;
        fn of(config: &crate::config::Config) {}
        use super::{queue, slots::{Permit, Slots}};
    ";
    let module = ["admission", "slots"].map(str::to_owned);
    let found: Vec<_> = used(code, &module).iter().map(|path| path.join("::")).collect();
    assert_eq!(
        found,
        [
            "body::self",
            "body::worker::WorkerFrames",
            "error::Error",
            "key",
            "metrics::labels",
            "config::Config",
            "admission::queue",
            "admission::slots::Permit",
            "admission::slots::Slots",
        ]
    );
    let found = used("use super::super::policy::of;", &module);
    assert_eq!(found, [["policy", "of"]]);
}
