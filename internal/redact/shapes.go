package redact

import (
	"regexp"
	"strings"
)

var (
	// userinfo is what stands between the scheme and the host of a URL.
	userinfo = regexp.MustCompile(`\b([A-Za-z][A-Za-z0-9+.-]*)://([^/?#\s"'<>]+)@`)
	// userOnly are schemes whose URLs name a user or a container there.
	userOnly = set(`ssh sftp git git+ssh rsync hdfs abfs abfss wasb wasbs`)

	// header is what authorizes a request over HTTP.
	header = regexp.MustCompile(`(?i)\b((?:proxy-)?authorization["']?\s*[:=]\s*["']?(?:(?:bearer|basic|digest|token|apikey|negotiate)\s+)?)[^\s"',;]+`)
	bearer = regexp.MustCompile(`(?i)\b(bearer\s+)([A-Za-z0-9._~+/=-]{8,})`)

	// tokens are well-known forms of secrets.
	tokens = regexp.MustCompile(strings.Join([]string{
		`\bsk-(?:(?:proj|ant|svcacct|admin|or|lf|live|test)-[A-Za-z0-9_-]{16,}|[A-Za-z0-9_]{20,})`, // OpenAI, Anthropic and those like them
		`\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}`,                                                   // Stripe
		`\bgh[pousr]_[A-Za-z0-9]{20,}`,
		`\bgithub_pat_[A-Za-z0-9_]{20,}`,
		`\bglpat-[A-Za-z0-9_-]{16,}`,
		`\bhf_[A-Za-z0-9]{20,}`,
		`\b(?:AKIA|ASIA)[0-9A-Z]{16}\b`,
		`\bAIza[0-9A-Za-z_-]{35}`,
		`\bxox[abeoprs]-[A-Za-z0-9-]{10,}`,
		`\bnvapi-[A-Za-z0-9_-]{20,}`,
		`\bnpm_[A-Za-z0-9]{36}`,
		`\bwandb_v[0-9]+_[A-Za-z0-9_]{40,}`,
		`\bhttps://hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{20,}`,
		`\bpypi-[A-Za-z0-9_-]{40,}`,
		`\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]*`, // JSON web tokens
		`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)`,
	}, "|"))
)

// Text returns a text, such as an error, without what looks like a secret by
// itself: user information in URLs, headers that authorize, and well-known forms
// of tokens. What only its name makes a secret stays.
func Text(text string) string {
	text = userinfo.ReplaceAllStringFunc(text, func(found string) string {
		m := userinfo.FindStringSubmatch(found)
		if userOnly[strings.ToLower(m[1])] && !strings.Contains(m[2], ":") {
			return found
		}
		return m[1] + "://" + Mark + "@"
	})
	text = header.ReplaceAllString(text, "${1}"+Mark)
	text = bearer.ReplaceAllStringFunc(text, func(found string) string {
		m := bearer.FindStringSubmatch(found)
		if len(m[2]) < 24 && !strings.ContainsAny(m[2], "0123456789") { // "bearer authentication"
			return found
		}
		return m[1] + Mark
	})
	return tokens.ReplaceAllLiteralString(text, Mark)
}
