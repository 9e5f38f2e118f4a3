package s3

import (
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"

	"github.com/minio/minio-go/v7/pkg/s3utils"

	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Scheme begins the URL of a bucket.
const Scheme = "s3://"

// Location names a bucket, a prefix in it and the way to them. It never holds a secret, so it
// may be stored and printed.
type Location struct {
	Bucket    string
	Prefix    string // of all keys, without slashes at its ends; may be empty
	Endpoint  string // URL of the server; empty: Amazon's
	Region    string // empty: from the environment, or from the server
	PathStyle string // "1": the bucket is in the path; "0": in the host name; empty: as usual for the endpoint
	Profile   string // of the shared configuration files
	KMS       string // key by which the server encrypts what is written
	Payer     string // "requester": this account pays for requests to another's bucket
	Class     string // storage class of what is written
}

// parameters are the parameters of a URL, in the order of [Location.String].
var parameters = []struct {
	name    string
	of      func(*Location) *string
	pattern string
	wants   string
}{
	{"endpoint", func(l *Location) *string { return &l.Endpoint }, `(?i)^https?://`, "a URL such as https://host:9000"},
	{"region", func(l *Location) *string { return &l.Region }, `^[a-z0-9][a-z0-9-]{0,62}$`, "a name such as eu-west-1"},
	{"path-style", func(l *Location) *string { return &l.PathStyle }, `^[01]$`, "1 or 0"},
	{"profile", func(l *Location) *string { return &l.Profile }, `^[^\x00-\x1f\x7f]{1,255}$`, "the name of a profile"},
	{"kms", func(l *Location) *string { return &l.KMS }, `^[\x21-\x7e]{1,1000}$`, "the ID or ARN of a key"},
	{"payer", func(l *Location) *string { return &l.Payer }, `^requester$`, "requester"},
	{"class", func(l *Location) *string { return &l.Class }, `^[A-Z][A-Z0-9_-]{0,62}$`, "a storage class such as STANDARD_IA"},
}

// secret matches the names of parameters that hold secrets, after dashes, underscores and
// dots are removed.
const secret = `(?i)secret|accesskey|token|passw|credential|signature|^key$|^user(name)?$`

// matches compiles the pattern: at the start of a process that uses no bucket, the compilation
// of all of them would be in vain.
func matches(pattern, text string) bool { return regexp.MustCompile(pattern).MatchString(text) }

// Parse returns the location of a URL s3://bucket/prefix?parameters. Its errors never quote a
// secret.
func Parse(text string) (Location, error) {
	l, err := parse(text)
	if err != nil {
		return Location{}, problem.Errorf(problem.Invalid, "location of a bucket: %w", err)
	}
	return l, nil
}

func parse(text string) (l Location, err error) {
	rest, ok := strings.CutPrefix(text, Scheme)
	if !ok {
		return l, fmt.Errorf("it begins with %s; give s3://bucket/prefix", Scheme)
	}
	// Package url quotes what it cannot parse: user information is found before it does.
	authority, _, _ := strings.Cut(rest, "?")
	authority, _, _ = strings.Cut(authority, "/")
	if strings.ContainsAny(authority, "@:") {
		return l, fmt.Errorf("there is user information or a port before the bucket: %w", errSecret)
	}
	u, err := url.Parse(text)
	if err != nil {
		return l, fmt.Errorf("it is not a URL; give s3://bucket/prefix, and write %%25 for %%")
	}
	if u.Fragment != "" {
		return l, fmt.Errorf("it has a fragment; write %%23 for #")
	}
	l.Bucket, l.Prefix = u.Host, strings.Trim(u.Path, "/")
	if err := s3utils.CheckValidBucketName(l.Bucket); err != nil {
		return l, fmt.Errorf("bucket %.100q: %w", l.Bucket, err)
	}
	if l.Prefix != "" && object.Validate(l.Prefix) != nil {
		return l, fmt.Errorf("prefix %.200q is not a clean path; leave out the parts . and .. and empty ones", l.Prefix)
	}
	if len(l.Prefix) > 512 {
		return l, fmt.Errorf("the prefix has %d bytes, at most 512 leave room for names", len(l.Prefix))
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return l, fmt.Errorf("the parameters are not well formed; write name=value&name=value")
	}
	return l, l.set(query)
}

// errSecret refuses a secret in a URL: URLs are printed, logged and stored.
var errSecret = errors.New("a URL holds no secrets; use the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), a profile of the shared files, or the role of the machine")

// set assigns the parameters.
func (l *Location) set(query url.Values) error {
	var names []string
	for _, p := range parameters {
		names = append(names, p.name)
	}
	for name := range query {
		if matches(secret, strings.NewReplacer("-", "", "_", "", ".", "").Replace(name)) {
			return fmt.Errorf("parameter %.50q: %w", name, errSecret)
		}
	}
	for _, p := range parameters {
		values, there := query[p.name]
		delete(query, p.name)
		switch {
		case !there, len(values) == 1 && values[0] == "":
			continue
		case len(values) > 1:
			return fmt.Errorf("parameter %s is there %d times", p.name, len(values))
		case !matches(p.pattern, values[0]):
			return fmt.Errorf("parameter %s wants %s", p.name, p.wants)
		}
		*p.of(l) = values[0]
	}
	for name := range query {
		return fmt.Errorf("parameter %.50q is unknown; there are %s", name, strings.Join(names, ", "))
	}
	if l.Endpoint == "" {
		return nil
	}
	return l.checkEndpoint()
}

// checkEndpoint accepts the URL of a server, and makes it canonical.
func (l *Location) checkEndpoint() error {
	u, err := url.Parse(l.Endpoint)
	switch {
	case strings.Contains(l.Endpoint, "@"):
		return fmt.Errorf("parameter endpoint: %w", errSecret)
	case err != nil || u.Hostname() == "":
		return fmt.Errorf("parameter endpoint wants a URL such as https://host:9000")
	case strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("parameter endpoint is a URL without a path; the bucket is named before it")
	}
	l.Endpoint = u.Scheme + "://" + strings.ToLower(u.Host)
	return nil
}

// String returns the canonical URL, which [Parse] accepts.
func (l Location) String() string {
	text := l.Path("")
	joint := "?"
	for _, p := range parameters {
		if value := *p.of(&l); value != "" {
			text += joint + p.name + "=" + url.QueryEscape(value)
			joint = "&"
		}
	}
	return text
}

// Path returns the URL of a name below the prefix, without parameters.
func (l Location) Path(name string) string {
	u := url.URL{Scheme: "s3", Host: l.Bucket, Path: "/" + l.key(name)}
	if u.Path == "/" {
		u.Path = ""
	}
	return u.String()
}

// key returns the key of a name; that of the empty name is the prefix.
func (l Location) key(name string) string {
	if l.Prefix == "" || name == "" {
		return l.Prefix + name
	}
	return l.Prefix + "/" + name
}
