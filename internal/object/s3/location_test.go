package s3

import (
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/problem"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"s3://bucket":                  "s3://bucket",
		"s3://bucket/":                 "s3://bucket",
		"s3://bucket/a/b/":             "s3://bucket/a/b",
		"s3://bucket/a%20b?region=":    "s3://bucket/a%20b",
		"s3://bucket?region=eu-west-1": "s3://bucket?region=eu-west-1",
		"s3://b-1/p?class=STANDARD_IA&payer=requester&kms=arn:aws:kms:eu-west-1:1:key/a&profile=my%20profile&path-style=0&region=x&endpoint=HTTP://Host:9000/": "s3://b-1/p?endpoint=http%3A%2F%2Fhost%3A9000&region=x&path-style=0&profile=my+profile&kms=arn%3Aaws%3Akms%3Aeu-west-1%3A1%3Akey%2Fa&payer=requester&class=STANDARD_IA",
	} {
		l, err := Parse(text)
		if err != nil || l.String() != want {
			t.Errorf("%s: %s, %v; want %s", text, l, err, want)
			continue
		}
		if again, err := Parse(l.String()); again != l || err != nil {
			t.Errorf("%s is not canonical: %+v, %v", l, again, err)
		}
	}
	l, err := Parse("s3://bucket/a%2520b")
	if err != nil || l.Prefix != "a%20b" || l.key("c/d") != "a%20b/c/d" || l.Path("c d") != "s3://bucket/a%2520b/c%20d" {
		t.Errorf("%+v, %v", l, err)
	}
}

// TestParseRefuses checks that errors tell what is wrong, and never quote a secret.
func TestParseRefuses(t *testing.T) {
	const hidden = "wJalrXUtnFEMI"
	for text, want := range map[string]string{
		"file:///x":                                         "begins with s3://",
		"s3://":                                             "bucket",
		"s3://ab":                                           "bucket",
		"s3://bucket/../x":                                  "clean path",
		"s3://bucket/a//b":                                  "clean path",
		"s3://bucket/%zz":                                   "%25",
		"s3://bucket/x#y":                                   "%23",
		"s3://bucket?colour=red":                            "endpoint, region, path-style, profile, kms, payer, class",
		"s3://bucket?payer=me":                              "payer wants requester",
		"s3://bucket?path-style=true":                       "path-style wants 1 or 0",
		"s3://bucket?endpoint=host:9000":                    "endpoint wants a URL",
		"s3://bucket?endpoint=http://":                      "endpoint wants a URL",
		"s3://bucket?endpoint=http://host/bucket":           "without a path",
		"s3://bucket?region=a&region=b":                     "2 times",
		"s3://AKIA:" + hidden + "@bucket/x":                 "no secrets",
		"s3://AKIA:" + hidden + "/x":                        "no secrets",
		"s3://bucket?secret_key=" + hidden:                  "no secrets",
		"s3://bucket?SecretAccessKey=" + hidden:             "no secrets",
		"s3://bucket?access-key=" + hidden:                  "no secrets",
		"s3://bucket?AWS_ACCESS_KEY_ID=" + hidden:           "no secrets",
		"s3://bucket?aws.session.token=" + hidden:           "no secrets",
		"s3://bucket?X-Amz-Signature=" + hidden:             "no secrets",
		"s3://bucket?password=" + hidden:                    "no secrets",
		"s3://bucket?endpoint=http://u:" + hidden + "@host": "no secrets",
		"s3://bucket/x?region=" + hidden + "%zz":            "not well formed",
		"s3://bucket/%zz?secret=" + hidden:                  "%25",
		"s3://bucket?" + hidden:                             "unknown",
	} {
		_, err := Parse(text)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), hidden) && want != "unknown" {
			t.Errorf("%s: %v, want %q", text, err, want)
			continue
		}
		if kinds := problem.Kinds(err); len(kinds) == 0 || kinds[0] != problem.Invalid {
			t.Errorf("%s: kinds %v", text, kinds)
		}
	}
}

// TestKeysOfTheEnvironment checks the order of the sources, and that none is a clear error.
func TestKeysOfTheEnvironment(t *testing.T) {
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ACCESS_KEY", "AWS_SECRET_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE"} {
		t.Setenv(name, "")
	}
	dir := t.TempDir()
	t.Setenv("AWS_CONFIG_FILE", dir+"/none")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", write(t, dir+"/credentials", "[default]\naws_access_key_id = default-id\naws_secret_access_key = x\n[other]\naws_access_key_id = other-id\naws_secret_access_key = x\n[empty]\nregion = x\n"))
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	used := func(at Location) string {
		k, err := newKeys(at, nil, nil)
		if err != nil {
			return err.Error()
		}
		defer k.close()
		v, err := k.get(t.Context())
		if err != nil {
			return err.Error()
		}
		return v.AccessKeyID
	}
	check := func(what, got, want string) {
		t.Helper()
		if !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
	}
	check("default profile", used(Location{}), "default-id")
	check("profile of the URL", used(Location{Profile: "other"}), "other-id")
	check("profile without keys", used(Location{Profile: "empty"}), "profile empty: it has neither keys")
	t.Setenv("AWS_PROFILE", "other")
	check("profile of the environment", used(Location{}), "other-id")
	t.Setenv("AWS_ACCESS_KEY_ID", "env-id")
	check("half a pair", used(Location{}), "set both")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "x")
	check("environment", used(Location{}), "env-id")
	check("profile of the URL before the environment", used(Location{Profile: "other"}), "other-id")
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", dir+"/none")
	t.Setenv("AWS_PROFILE", "")
	check("nothing", used(Location{}), "no credentials: profile default")
}
