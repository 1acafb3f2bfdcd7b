"""Images that messages name by URLs of http: whom an engine asks, and what it takes for one."""

import asyncio
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="needs the extra `vision`")

from picture_host import PATIENCE, PictureHost, picture, picture_host, send

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.config import Config
from nanovllm.images import fetching
from nanovllm.images.urls import Media

HERE = "127.0.0.1"


@pytest.fixture
def host() -> Iterator[PictureHost]:
    with picture_host() as host:
        yield host


def find(url: str, *domains: str) -> Any:
    config = Config("model", allowed_media_domains=domains or [HERE])
    return Media("", fetching.Fetcher(config.allowed_media_domains).fetch).find(url, "url")


def refused(url: str, *domains: str) -> str:
    with pytest.raises(ValueError, match=r"^`url` ") as caught:
        find(url, *domains)
    said = str(caught.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize("domain", ["localhost", "LocalHost"])
@pytest.mark.parametrize("name", ["localhost", "LOCALHOST"])
def test_hosts_are_told_apart_by_their_names_in_any_case(host, domain, name):
    assert find(host.url("1.png?size=9", name), domain) == picture(1)
    said = refused(host.url("1.png"), domain)
    assert (
        "must be of a host in `allowed_media_domains` (localhost), got 'http://127.0.0.1:" in said
    )
    [(path, headers)] = host.asked
    assert (path, headers["Host"]) == ("/1.png?size=9", f"localhost:{host.port}")
    assert not {"Authorization", "Cookie", "Proxy-Authorization"} & {*headers}


def test_what_looks_like_an_allowed_host(host):
    other = f"localhost:{host.port}"
    for url in (
        f"http://{HERE}@{other}/1.png",
        f"http://{HERE}:80@{other}/1.png",
        f"http://{HERE}\\@{other}/1.png",
        f"http://user:secret@{HERE}:{host.port}/1.png",
    ):
        said = refused(url)
        assert "no user or password" in said and "secret" not in said
    for url in (
        f"http://{HERE}.{other}/1.png",
        f"http://{other}/{HERE}/1.png",
        f"http://{other}#{HERE}",
        f"http://{other}?{HERE}",
        f"http:\\\\{HERE}:{host.port}/1.png",
        f"http:/{HERE}:{host.port}/1.png",
        f"http://{HERE}.:{host.port}/1.png",
        f"http://0x7f.1:{host.port}/1.png",
        f"http://[::ffff:{HERE}]:{host.port}/1.png",
        "http://",
    ):
        assert "must be of a host in `allowed_media_domains` (127.0.0.1), got 'http:" in refused(
            url
        )
    for url in (f"http://{HERE}:x/1.png", f"http://{HERE}:99999/1.png", f"http://[{HERE}/1.png"):
        assert "must be a URL" in refused(url)
    assert "a URL of http or https" in refused(f"http://{HERE}:0/1.png")
    assert host.asked == []


def test_redirects_lead_to_allowed_hosts_alone(host):
    host.leads("relative", "/2.png")
    host.leads("both", host.url("relative", "localhost"), 308)
    host.leads("away", host.url("2.png", "localhost"), 301)
    host.leads("file", "file:///etc/hostname")
    host.leads("user", f"http://a:b@{HERE}:{host.port}/2.png")
    host.leads("circle", "/circle")
    assert find(host.url("relative")) == find(host.url("both"), HERE, "localhost") == picture(2)
    before = len(host.asked)
    said = refused(host.url("away"))
    assert f"of a host in `allowed_media_domains` ({HERE})" in said
    assert f"2.png', a redirect from '{host.url('away')}'" in said
    assert "http or https, got 'file:///etc/hostname', a redirect" in refused(host.url("file"))
    assert "no user or password" in refused(host.url("user"))
    assert [path for path, _ in host.asked[before:]] == ["/away", "/file", "/user"]
    assert "at most 5 redirects" in refused(host.url("circle"))
    assert [path for path, _ in host.asked].count("/circle") == 6


def test_answers_that_are_no_image(host, monkeypatch):
    monkeypatch.setattr(fetching, "MAX_BYTES", 5000)
    rest: list[int] = []

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not host.gate.is_set():
            rest.append(handler.wfile.write(b"x" * 1000))

    def announced(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "5001")
        handler.end_headers()
        assert host.gate.wait(PATIENCE)  # the client does not wait for it

    def torn(handler: BaseHTTPRequestHandler) -> None:
        send(handler, b"x" * 900, Content_Length=1000)

    def chunked(handler: BaseHTTPRequestHandler) -> None:
        send(handler, b"5\r\nabcde\r\n0\r\n\r\n", Content_Length="", Transfer_Encoding="chunked")

    def garbage(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"SSH-2.0-OpenSSH\r\n")

    host.pages |= {f"/{page.__name__}": page for page in (endless, announced, torn, garbage)}
    host.pages["/exact"] = lambda handler: send(handler, b"y" * 5000)
    host.pages["/chunked"] = chunked
    assert find(host.url("exact")) == b"y" * 5000
    assert find(host.url("chunked")) == b"abcde"
    for path in ("endless", "announced"):
        said = refused(host.url(path))
        assert said == f"`url` cannot be fetched: '{host.url(path)}': it has more than 5,000 bytes"
    assert refused(host.url("torn")).endswith("it breaks off 100 bytes before its end")
    assert refused(host.url("missing")).endswith("the answer is 404 Not Found")
    assert refused(host.url("garbage")).endswith("/garbage': BadStatusLine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "port", 1)
        assert "Connection refused" in refused(host.url("1.png"))


@pytest.mark.parametrize("begin", ["", "HTTP/1.1 200 OK\r\nX: ", "HTTP/1.1 200 OK\r\n\r\n"])
def test_a_slow_host_has_a_time_for_everything(host, monkeypatch, begin):
    """It says a letter now and then, so that no single wait is long."""

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(begin.encode())
        for _ in range(500):  # not for ever, or the test would not fail but hang
            if host.gate.wait(0.01):
                return
            handler.wfile.write(b"a")

    host.pages["/drip"] = drip
    monkeypatch.setattr(fetching, "SECONDS", 0.3)
    assert "must come within 0.3 seconds" in refused(host.url("drip"))
    assert not host.gate.is_set()


def test_proxies_of_the_environment_are_not_asked(host, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert find(host.url("3.png")) == picture(3)


def test_certificates_are_checked(tmp_path, monkeypatch):
    """A host of https with a certificate of its own: trusted where the machine trusts it."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj"]
    command += ["/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    try:
        subprocess.run(
            [*command, "-keyout", key, "-out", certificate], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("needs openssl")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with picture_host(context) as host:
        url = host.url("4.png", "localhost").replace("http:", "https:")
        assert "CERTIFICATE_VERIFY_FAILED" in refused(url, "localhost")
        assert host.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert find(url, "localhost") == picture(4)
        assert "certificate is not valid for" in refused(url.replace("localhost", HERE))


@pytest.mark.parametrize(
    "domain",
    [
        "",
        "http://a.org",
        "a.org:80",
        "*.a.org",
        "a.org/b",
        "a@b",
        " a.org",
        "é.org",
        "[::1]",
        "a..b",
    ],
)
def test_domains_are_names_of_hosts(domain):
    with pytest.raises(ValueError, match=r"^`allowed_media_domains` must hold names of hosts with"):
        Config("model", allowed_media_domains=[domain])
    assert Config("model", allowed_media_domains=[]).allowed_media_domains is None
    given = Config("model", allowed_media_domains=["A.org", "::1", "10.0.0.1"])
    assert given.allowed_media_domains == ("a.org", "::1", "10.0.0.1")


# -- through an engine ----------------------------------------------------------------------------


def test_chat(host: PictureHost, tmp_path: Path) -> None:
    """Pictures of several conversations are fetched at once, and seen."""
    from make_tiny_vision import make_model

    make_model(tmp_path)
    both = threading.Barrier(2)

    def together(handler: BaseHTTPRequestHandler) -> None:
        both.wait(PATIENCE)
        send(handler, picture(int(handler.path[-1])))

    host.pages |= {"/together/5": together, "/together/6": together}
    host.pages["/text"] = lambda handler: send(handler, b"no picture")
    params = SamplingParams(temperature=0, max_tokens=12)

    def ask(image: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "image", "image": image}]}]

    options = {"num_kvcache_blocks": 64, "kvcache_block_size": 16, "max_model_len": 512}
    limit = {"image": 2}
    with LLM(tmp_path, allowed_media_domains=[HERE], limit_mm_per_prompt=limit, **options) as llm:
        asked = [ask(picture(5)), ask(picture(6))]
        wanted = [each.outputs[0].text for each in llm.chat(asked, params, use_tqdm=False)]
        assert len({*wanted}) == 2
        urls = [host.url("together/5"), host.url("together/6")]
        outputs = llm.chat([*map(ask, urls)], params, use_tqdm=False)
        assert [each.outputs[0].text for each in outputs] == wanted
        assert llm.metrics()["num_images_encoded"] == 2, "a picture is known by its pixels"
        for url, reason in (
            (host.url("text"), "must be a picture that Pillow can read, of JPEG, .*, got 10 bytes"),
            (host.url("5.png", "localhost"), r"`allowed_media_domains` \(127.0.0.1\)"),
            (host.url("none.png"), "the answer is 404"),
        ):
            with pytest.raises(ValueError, match=reason):
                llm.chat([ask(url)], params, use_tqdm=False)
            outputs = llm.chat(
                [ask(url), ask(host.url("6.png"))], params, use_tqdm=False, on_error="return"
            )
            assert outputs[0].error and outputs[1].outputs[0].text == wanted[1]
        before = len(host.asked)
        many = [{"role": "user", "content": ask(host.url("5.png"))[0]["content"] * 3}]
        with pytest.raises(ValueError, match=r"must be one of at most 2 images \(limit_mm_per"):
            llm.chat(many, params, use_tqdm=False)
        assert len(host.asked) == before + 2, "one too many is not fetched"
        with pytest.raises(ValueError, match=r"a path or a data URL, got .*: download it"):
            prompt = {"prompt": "<|image_pad|>", "multi_modal_data": {"image": urls[0]}}
            llm.generate([prompt], params, use_tqdm=False)


def test_hosts_that_take_long_keep_other_chats_from_nothing(
    host: PictureHost, tmp_path: Path
) -> None:
    """Nor the end of the engine, once those who asked have left."""
    from make_tiny_vision import make_model

    make_model(tmp_path)
    host.pages["/slow"] = lambda _: host.gate.wait(PATIENCE)
    params = SamplingParams(temperature=0, max_tokens=3)
    slow = [{"type": "image_url", "image_url": {"url": host.url("slow")}}]

    async def last(llm: AsyncLLM, content: Any) -> Any:
        return [
            output async for output in llm.chat([{"role": "user", "content": content}], params)
        ][-1]

    async def main() -> None:
        options = {"num_kvcache_blocks": 64, "kvcache_block_size": 16, "max_model_len": 512}
        async with AsyncLLM(tmp_path, allowed_media_domains=[HERE], **options) as llm:
            tasks = [asyncio.create_task(last(llm, slow)) for _ in range(40)]
            while len(host.asked) < 16:
                await asyncio.sleep(0)
            assert len((await last(llm, "hi")).outputs[0].token_ids) == 3
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in found)
            assert len((await last(llm, "hi")).outputs[0].token_ids) == 3
        assert len(host.asked) == 16, "calls that had not begun are dropped"

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
