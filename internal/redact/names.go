package redact

import (
	"slices"
	"strings"
	"unicode"
)

// rank is how certain it is that the value of a name is secret.
type rank int

const (
	never   rank = iota
	ifHex        // secret if 40 hexadecimal digits: the key in --use_wandb KEY
	perhaps      // the key or token of something: data, unless its value looks generated
	mostly
	always
)

// Last words of secret names. Those of mostly often have values that are not
// secret: short numbers, and the special tokens of language models. A key or a
// token is of this kind if it stands alone or follows a word of ofAccess. After
// any other word its value decides, as in the rules of gitleaks and
// detect-secrets: they require a name of access, or a value that looks generated.
var (
	alwaysSecret = set(`password passwords passwd passphrase passphrases secret secrets credential credentials creds
		apikey apikeys accesskey secretkey privatekey authtoken accesstoken authorization jwt`)
	mostlySecret = set(`key token auth bearer cookie`)
	// endsSecret are ends of one-word names such as PGPASSWORD.
	endsSecret = []string{"password", "passwd", "passphrase", "apikey", "accesskey", "secretkey", "privatekey", "authtoken", "accesstoken", "sshpass"}
	// pluralSecret are secret only after a word of ofAccess: max_tokens and
	// num_keys are numbers.
	pluralSecret = set(`keys tokens cookies`)
	ofAccess     = set(`access account admin api app auth aws azure bearer bot client comet consumer db deploy encryption face gh github
		gitlab hf hub huggingface identity jwt license login master neptune oauth openai personal priv private refresh root sas secret
		security service session shared signing slack ssh storage subscription vault wandb webhook`)
	// behindAWord are secret only after another word: PWD alone is a directory.
	behindAWord = set(`pwd pass`)
)

// notBefore are words before key or token that make it data.
var notBefore = map[string]map[string]bool{
	"key": set(`action answer attention attn batch best cache caption checkpoint ckpt class column composite config conversation
		data dataset dict event feature field foreign group id image index input instruction join json label log lookup loss map
		message messages metric model monitor module name obs observation output param partition primary prng prompt public query
		random response reward rng role row sample score sort source state step target task text time timestamp unique value video
		weight weights`),
	"token": set(`audio begin bos cls decoder each end eod eoi eos eot extra first image last mask max min new newline next num
		pad padding per placeholder prefix prev sentinel sep separator single special start stop suffix think unk video vision`),
	"credentials": set(`application`), // GOOGLE_APPLICATION_CREDENTIALS is a path
	"pass":        set(`backward first forward last one per second single two`),
}

func set(words string) map[string]bool {
	out := map[string]bool{}
	for word := range strings.FieldsSeq(words) {
		out[word] = true
	}
	return out
}

// rank judges a name by its last word. In a dotted name, such as
// credentials.user, one part that is always secret makes the whole name secret.
func (n Names) rank(name string) rank {
	parts := strings.FieldsFunc(name, func(r rune) bool { return r == '.' || r == '/' })
	best := never
	for i, part := range parts {
		r := rankOf(words(part))
		if i == len(parts)-1 || r == always {
			best = max(best, r)
		}
	}
	all := words(name)
	for _, more := range n.more {
		if len(all) >= len(more) && slices.Equal(all[len(all)-len(more):], more) {
			return always
		}
	}
	return best
}

func rankOf(w []string) rank {
	for len(w) > 1 && encoding(w[len(w)-1]) {
		w = w[:len(w)-1]
	}
	if len(w) == 0 {
		return never
	}
	last, before := strings.TrimRight(w[len(w)-1], "0123456789"), ""
	if len(w) > 1 {
		before = w[len(w)-2]
	}
	switch {
	case notBefore[last][before]:
		return never
	case alwaysSecret[last], last == "pwd" && before != "", slices.ContainsFunc(endsSecret, func(end string) bool { return strings.HasSuffix(last, end) }):
		return always
	case mostlySecret[last] && before != "" && !ofAccess[before] && last != "auth":
		return perhaps
	case mostlySecret[last], behindAWord[last] && before != "", pluralSecret[last] && ofAccess[before]:
		return mostly
	case last == "wandb":
		return ifHex
	}
	return never
}

// encoding reports whether the last word of a name describes only the encoding of
// its value, or numbers it.
func encoding(word string) bool {
	switch word {
	case "json", "hex", "b64", "base64":
		return true
	}
	return strings.Trim(word, "0123456789") == ""
}

// words splits a name into lower-case words: api-key, api_key, API_KEY, apiKey
// and APIKey all give api and key.
func words(name string) []string {
	var out []string
	runes := []rune(name)
	begin := 0
	end := func(i int) {
		if i > begin {
			out = append(out, strings.ToLower(string(runes[begin:i])))
		}
		begin = i
	}
	for i, r := range runes {
		switch {
		case !unicode.IsLetter(r) && !unicode.IsDigit(r):
			end(i)
			begin = i + 1
		case i == begin || !unicode.IsUpper(r):
		case !unicode.IsUpper(runes[i-1]), i+1 < len(runes) && unicode.IsLower(runes[i+1]): // api·Key, API·Key
			end(i)
		}
	}
	end(len(runes))
	return out
}

// hides reports whether to redact the value of a name.
func (n Names) hides(name, value string) bool { return n.rank(name).hides(value) }

// notSecret are values that state whether or where a secret exists: words, and
// references to the environment.
var notSecret = pattern(`(?i)^(|true|false|yes|no|on|off|none|null|auto|\$[A-Z_][A-Z0-9_]*|\$\{[^}]+\}|\$\(.*)$`)

// ofData are values of keys and tokens that are data: numbers that are not
// secret, and special tokens such as <|endoftext|> and [PAD].
var ofData = pattern(`^([-+0-9.eE]{1,7}|[0-9]+\.[0-9]+|<[^<>]*>|\[[A-Za-z_]+\])$`)

// hex40 is the form of a Weights & Biases key, and of a commit.
var hex40 = pattern(`^[0-9a-fA-F]{40}$`)

// plain is a value that a person has chosen, such as chosen or input_ids: words
// that name something, perhaps followed by digits. A word has at most 13 letters;
// generated values are longer.
var plain = pattern(`^(?:[A-Z]?[a-z]{1,13}|[A-Z]{1,13})[0-9]{0,2}(?:[_. -](?:[A-Z]?[a-z]{1,13}|[A-Z]{1,13}|)[0-9]{0,2})*$`)

// generated reports whether a value looks generated by a program. A generated
// token or key has at least short characters.
func generated(value string) bool {
	const short = 8
	text := strings.Trim(value, "<>[]{}|#: ")
	isNumber := strings.Trim(text, "0123456789.,+-") == ""
	return len(text) >= short && !isNumber && !ofData().MatchString(value) && !plain().MatchString(text)
}

// hides reports whether to redact a value.
func (r rank) hides(value string) bool {
	switch {
	case r == never, notSecret().MatchString(value):
		return false
	case value == Mark:
		return true
	case r == ifHex:
		return hex40().MatchString(value)
	case r == perhaps:
		return generated(value)
	case r == mostly:
		return !ofData().MatchString(value)
	}
	return true
}

var (
	// userinfo is the part between the scheme and the host of a URL.
	userinfo = pattern(`\b([A-Za-z][A-Za-z0-9+.-]*)://([^/?#\s"'<>]+)@`)
	// userOnly are schemes whose URLs name a user or a container in that part.
	userOnly = set(`ssh sftp git git+ssh rsync hdfs abfs abfss wasb wasbs`)

	// header is an HTTP header that authorizes a request.
	header = pattern(`(?i)\b((?:proxy-)?authorization["']?\s*[:=]\s*["']?(?:(?:bearer|basic|digest|token|apikey|negotiate)\s+)?)[^\s"',;]+`)
	bearer = pattern(`(?i)\b(bearer\s+)([A-Za-z0-9._~+/=-]{8,})`)

	// tokens are well-known forms of secrets.
	tokens = pattern(strings.Join([]string{
		`\bsk-(?:(?:proj|ant|svcacct|admin|or|lf|live|test)-[A-Za-z0-9_-]{16,}|[A-Za-z0-9_]{20,})`, // OpenAI, Anthropic and similar
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

// Text removes from a text, such as an error, everything that looks like a secret
// by itself: user information in URLs, headers that authorize, and well-known
// forms of tokens. A value that is secret only by its name stays.
func Text(text string) string {
	text = userinfo().ReplaceAllStringFunc(text, func(found string) string {
		m := userinfo().FindStringSubmatch(found)
		if userOnly[strings.ToLower(m[1])] && !strings.Contains(m[2], ":") {
			return found
		}
		return m[1] + "://" + Mark + "@"
	})
	text = header().ReplaceAllString(text, "${1}"+Mark)
	text = bearer().ReplaceAllStringFunc(text, func(found string) string {
		m := bearer().FindStringSubmatch(found)
		if len(m[2]) < 24 && !strings.ContainsAny(m[2], "0123456789") { // "bearer authentication"
			return found
		}
		return m[1] + Mark
	})
	return tokens().ReplaceAllLiteralString(text, Mark)
}
