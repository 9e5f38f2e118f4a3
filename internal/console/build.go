package console

import "runtime/debug"

// What the build of a release sets by -ldflags -X; see release/programs.go. Other
// builds leave them empty.
var (
	release string // the version in python/pyproject.toml
	commit  string // the commit of the tree
	date    string // the time of that commit, RFC 3339 in UTC
)

// Release returns the version of a build that has one, and otherwise fallback. Programs
// and the Python package compare it: it has no commit and no date.
func Release(fallback string) string {
	if release == "" {
		return fallback
	}
	return release
}

// Version returns the version for `--version`: Release, and the commit and its time
// where the build has them, as in
//
//	0.1.0 (commit f758cde0cafe, 2026-11-27T00:10:00Z)
func Version(fallback string) string {
	return described(Release(fallback), commit, date)
}

// described joins a version with a commit and its time, either of which may be empty: a build
// from an archive of the source has neither.
func described(version, commit, date string) string {
	switch {
	case commit == "":
		return version
	case date == "":
		return version + " (commit " + commit + ")"
	}
	return version + " (commit " + commit + ", " + date + ")"
}

// Module returns the version of the program's main module, as the Go command recorded
// it: a tag, a pseudo-version with the time and the commit, or the bare commit. It is
// "unknown" if nothing was recorded.
func Module() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && (v == "" || v == "(devel)") {
			v = s.Value
		}
	}
	if v == "" {
		return "unknown"
	}
	return v
}
