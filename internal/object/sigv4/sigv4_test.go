package sigv4

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

// The examples of the documentation of Signature Version 4 for S3.
var (
	exampleKey  = Key{"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"}
	exampleTime = time.Date(2013, 5, 24, 0, 0, 0, 0, time.UTC)
)

const exampleHost = "https://examplebucket.s3.amazonaws.com"

func request(t *testing.T, method, target string, header ...string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, exampleHost+target, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return r
}

func signatureOf(r *http.Request) string {
	_, s, _ := strings.Cut(r.Header.Get("Authorization"), "Signature=")
	return s
}

func TestSign(t *testing.T) {
	for want, r := range map[string]*http.Request{
		"f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41": request(t, "GET", "/test.txt", "Range", "bytes=0-9"),
		"fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543": request(t, "GET", "/?lifecycle"),
		"34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7": request(t, "GET", "/?prefix=J&max-keys=2"),
	} {
		Sign(r, exampleKey, "us-east-1", Hash(nil), exampleTime)
		if got := signatureOf(r); got != want {
			t.Errorf("%s: signature %s, want %s", r.URL, got, want)
		}
	}
	put := request(t, "PUT", "/test$file.text", "Date", "Fri, 24 May 2013 00:00:00 GMT", "X-Amz-Storage-Class", "REDUCED_REDUNDANCY")
	Sign(put, exampleKey, "us-east-1", Hash([]byte("Welcome to Amazon S3.")), exampleTime)
	if got, want := signatureOf(put), "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"; got != want {
		t.Errorf("%s: signature %s, want %s", put.URL, got, want)
	}
}

// A request without a header that it was signed with gets the signature of a request that
// never had it.
func TestResign(t *testing.T) {
	plain, altered := request(t, "GET", "/a%20b?x=1+2"), request(t, "GET", "/a%20b?x=1+2", "If-None-Match", "*")
	for _, r := range []*http.Request{plain, altered} {
		Sign(r, exampleKey, "us-east-1", Unsigned, exampleTime)
	}
	if signatureOf(plain) == signatureOf(altered) {
		t.Fatal("a header is not signed")
	}
	altered.Header.Del("If-None-Match")
	if err := Resign(altered, exampleKey); err != nil {
		t.Fatal(err)
	}
	if plain.Header.Get("Authorization") != altered.Header.Get("Authorization") {
		t.Errorf("signed again: %s, want %s", altered.Header.Get("Authorization"), plain.Header.Get("Authorization"))
	}
}

func TestResignRefuses(t *testing.T) {
	signed := request(t, "GET", "/")
	Sign(signed, Key{"another", "secret"}, "us-east-1", Unsigned, exampleTime)
	for want, r := range map[string]*http.Request{
		"no Authorization header": request(t, "GET", "/?X-Amz-Signature=1"),
		"no scope":                request(t, "GET", "/", "Authorization", algorithm+" SignedHeaders=host"),
		`access key "another"`:    signed,
	} {
		if err := Resign(r, exampleKey); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}
